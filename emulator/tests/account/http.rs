use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use azure_core::credentials::{AccessToken, Secret, TokenCredential, TokenRequestOptions};
use azure_core::time::{Duration, OffsetDateTime};
use azure_data_cosmos::options::UserAgentSuffix;
use azure_data_cosmos::{
    AccountEndpoint, AccountReference, CosmosClient, CosmosClientBuilder, CosmosError, CosmosRuntimeBuilder,
    RoutingStrategy, TransactionalBatch,
};
use duroxide_cosmos_emulator::{Gate, LocalAccount, RequestKind, Served, WireAction, WireRule};
use serde_json::Value;

use crate::fixture::*;
use crate::raw_http;

const ANY_PORT: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);

async fn serve(account: &LocalAccount) -> Served {
    account.serve(SocketAddr::from(ANY_PORT)).await.unwrap()
}

/// Connects a client over HTTP, as an application does, but with its own runtime.
async fn connect(account: AccountReference) -> Result<CosmosClient, CosmosError> {
    let runtime = CosmosRuntimeBuilder::new().build().await?;
    CosmosClientBuilder::new()
        .with_runtime(runtime)
        .with_user_agent_suffix(UserAgentSuffix::try_from("over-http").unwrap())
        .build(account, RoutingStrategy::PreferredRegions(Vec::new()))
        .await
}

fn endpoint(served: &Served) -> AccountEndpoint {
    served.endpoint().parse().unwrap()
}

async fn connect_with_key(served: &Served, key: &str) -> Result<CosmosClient, CosmosError> {
    let key = Secret::new(key.to_owned());
    connect(AccountReference::with_authentication_key(endpoint(served), key)).await
}

#[derive(Debug)]
struct FixedToken(&'static str);

#[async_trait::async_trait]
impl TokenCredential for FixedToken {
    async fn get_token(
        &self,
        _scopes: &[&str],
        _options: Option<TokenRequestOptions<'_>>,
    ) -> azure_core::Result<AccessToken> {
        let expires = OffsetDateTime::now_utc() + Duration::hours(1);
        Ok(AccessToken::new(self.0, expires))
    }
}

async fn connect_with_token(served: &Served, token: &'static str) -> Result<CosmosClient, CosmosError> {
    let credential = Arc::new(FixedToken(token));
    connect(AccountReference::with_credential(endpoint(served), credential)).await
}

#[tokio::test]
async fn every_item_operation_works_over_http() {
    let account = LocalAccount::builder().with_partitions(4).build();
    let served = serve(&account).await;
    let client = connect_with_key(&served, account.key()).await.unwrap();
    use_every_operation(&client).await;
    assert_eq!(account.partition_count(DATABASE, CONTAINER), 4);
    let stats = account.stats_of("over-http");
    assert_eq!(stats.of(RequestKind::Batch).requests, 1);
    assert_eq!(stats.of(RequestKind::Replace).failures, 1);
    served.shutdown().await;
}

#[tokio::test]
async fn clients_in_process_and_over_http_share_the_store() {
    let account = LocalAccount::new();
    let inside = create_container(&account.client().await).await;
    let served = serve(&account).await;
    let client = connect_with_key(&served, account.key()).await.unwrap();
    let outside = open_container(&client).await;
    inside.create_item("p", "a b", item("p", "a b", 1), None).await.unwrap();
    assert!(read(&outside, "p", "a b").await.is_some());
}

#[tokio::test]
async fn requests_on_the_address_of_one_client_are_counted_as_its_own() {
    let account = LocalAccount::new();
    create_container(&account.client().await).await;
    let served = account.serve_client(SocketAddr::from(ANY_PORT), "worker-1").await.unwrap();
    let container = open_container(&connect_with_key(&served, account.key()).await.unwrap()).await;
    let requests = account.stats().total().requests;
    assert!(account.put(DATABASE, CONTAINER, "p", &serde_json::json!(item("p", "a", 1))).await);
    assert_eq!(account.stats().total().requests, requests);
    assert!(read(&container, "p", "a").await.is_some());
    assert_eq!(account.stats_of("worker-1").of(RequestKind::Read).requests, 1);
    assert_eq!(account.stats_of("over-http").total().requests, 0);
}

#[tokio::test]
async fn a_wrong_key_is_refused() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let error = connect_with_key(&served, "d3Jvbmc=").await.err();
    assert_eq!(status(&error.unwrap()), 401);
    assert_eq!(account.stats().total().requests, 0);
}

#[tokio::test]
async fn a_token_is_accepted_once_it_is_registered() {
    let account = LocalAccount::new();
    create_container(&account.client().await).await;
    let served = serve(&account).await;
    let refused = connect_with_token(&served, "token-1").await.err();
    assert_eq!(status(&refused.unwrap()), 401);

    account.accept_token("token-1");
    let client = connect_with_token(&served, "token-1").await.unwrap();
    let container = open_container(&client).await;
    container.create_item("p", "1", item("p", "1", 1), None).await.unwrap();
    assert_eq!(query(&container, "SELECT * FROM c").await.len(), 1);
    assert_eq!(served.tokens_seen(), ["token-1"]);

    account.refuse_token("token-1");
    let refused = container.read_item("p", "1", None).await;
    assert_eq!(status(&refused.unwrap_err()), 401);
}

#[tokio::test]
async fn a_token_cannot_create_or_delete_databases_and_containers() {
    let account = LocalAccount::new();
    account.accept_any_token();
    create_container(&account.client().await).await;
    let served = serve(&account).await;
    let client = connect_with_token(&served, "whatever").await.unwrap();
    let refused = client.create_database("another", None).await.unwrap_err();
    assert_eq!(status(&refused), 403);
    assert_eq!(refused.status().sub_status().map(|s| s.value()), Some(5300));
    let refused = open_container(&client).await.delete(None).await.unwrap_err();
    assert_eq!(status(&refused), 403);
}

#[tokio::test]
async fn a_lost_answer_over_http_breaks_the_connection_after_the_write() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let client = connect_with_key(&served, account.key()).await.unwrap();
    let container = create_container(&client).await;
    let lose = WireRule::new(WireAction::LoseAnswer).on(RequestKind::Batch).times(1);
    let lost = account.wire().add(lose.client("over-http"));
    let batch = TransactionalBatch::new("p").create_item(item("p", "1", 1)).unwrap();
    let response = container.execute_transactional_batch(batch, None).await.unwrap();
    let results = response.into_model().unwrap();
    assert_eq!(results.results()[0].status_code(), 409);
    assert_eq!(lost.hits(), 1);
}

#[tokio::test]
async fn a_trailing_slash_is_accepted() {
    let account = LocalAccount::new();
    create_container(&account.client().await).await;
    let served = serve(&account).await;
    let headers = raw_http::signed(account.key(), "get", "colls", "dbs/db/colls/items");
    let (status, body) = raw_http::send(&served, "GET", "/dbs/db/colls/items/", &headers, "").await;
    assert_eq!(status, Some(200), "{body}");

    let mut headers = raw_http::signed(account.key(), "post", "docs", "dbs/db/colls/items");
    headers.push(("x-ms-documentdb-partitionkey", r#"["p"]"#.to_owned()));
    let body = r#"{"id":"1","pk":"p","value":1}"#;
    let (status, body) = raw_http::send(&served, "POST", "/dbs/db/colls/items/docs/", &headers, body).await;
    assert_eq!(status, Some(201), "{body}");
}

#[tokio::test]
async fn a_request_without_credential_is_refused_as_by_the_service() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let (status, body) = raw_http::send(&served, "GET", "/", &[], "").await;
    assert_eq!(status, Some(401));
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["code"], "Unauthorized");
}

#[tokio::test]
async fn the_account_reports_the_address_that_the_client_called() {
    let account = LocalAccount::builder().with_regions(&["West Europe", "North Europe"]).build();
    let served = serve(&account).await;
    let headers = raw_http::signed(account.key(), "get", "", "");
    let (status, body) = raw_http::send(&served, "GET", "/", &headers, "").await;
    assert_eq!(status, Some(200));
    let body: Value = serde_json::from_str(&body).unwrap();
    for locations in ["readableLocations", "writableLocations"] {
        let locations = body[locations].as_array().unwrap();
        assert_eq!(locations.len(), 1);
        assert_eq!(locations[0]["name"], "West Europe");
        assert_eq!(locations[0]["databaseAccountEndpoint"], served.endpoint());
    }
}

#[tokio::test]
async fn the_control_endpoints_count_requests_inject_faults_and_split_partitions() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    let served = serve(&account).await;
    let control = |method: &'static str, path: &'static str, body: &'static str| {
        let served = &served;
        async move {
            let path = format!("/_emulator/{path}");
            let (status, body) = raw_http::send(served, method, &path, &[], body).await;
            (status.unwrap(), serde_json::from_str::<Value>(&body).unwrap())
        }
    };
    assert_eq!(control("GET", "health", "").await.0, 200);
    assert_eq!(control("POST", "stats/reset", "").await.0, 200);
    let rule = r#"{"kind":"create","times":1,"action":{"type":"refuse","status":403}}"#;
    assert_eq!(control("POST", "faults", rule).await.0, 201);
    assert_eq!(control("POST", "faults", r#"{"action":{"type":"explode"}}"#).await.0, 400);
    let refused = container.create_item("p", "1", item("p", "1", 1), None).await;
    assert_eq!(status(&refused.unwrap_err()), 403);
    let (_, stats) = control("GET", "stats", "").await;
    assert_eq!(stats["kinds"]["create"]["failures"], 1);
    assert_eq!(stats["total"]["requests"], 1);

    let always = r#"{"kind":"create","action":{"type":"refuse","status":403}}"#;
    control("POST", "faults", always).await;
    let (status, taken) = control("DELETE", "faults", "").await;
    assert_eq!((status, &taken["hits"]), (200, &serde_json::json!([1, 0])));
    container.create_item("p", "1", item("p", "1", 1), None).await.unwrap();

    let slow_answer = r#"{"kind":"create","one_in":1,"action":{"type":"delay_answer","ms":1}}"#;
    assert_eq!(control("POST", "faults", slow_answer).await.0, 201);
    assert_eq!(control("POST", "faults", r#"{"one_in":0,"action":{"type":"lose_answer"}}"#).await.0, 400);
    container.create_item("p", "2", item("p", "2", 1), None).await.unwrap();
    assert_eq!(control("DELETE", "faults", "").await.1["hits"], serde_json::json!([1]));

    let split = r#"{"database":"db","container":"items","partition":0}"#;
    assert_eq!(control("POST", "split", split).await.0, 200);
    assert_eq!(account.partition_count(DATABASE, CONTAINER), 2);
    let merge = r#"{"database":"db","container":"items","partitions":[1,2]}"#;
    assert_eq!(control("POST", "merge", merge).await, (200, serde_json::json!({ "partition": 3 })));
    assert_eq!(control("POST", "merge", merge).await.0, 400);
    assert_eq!(control("GET", "nothing", "").await.0, 404);

    assert_eq!(control("POST", "misbehave", r#"{"type":"small-pages","value":1}"#).await.0, 201);
    assert_eq!(control("POST", "misbehave", r#"{"type":"refuse-query","value":"LIKE"}"#).await.0, 201);
    let (status, refusal) = control("POST", "misbehave", r#"{"type":"explode"}"#).await;
    assert_eq!(status, 400);
    assert!(refusal["message"].as_str().unwrap().contains("empty-pages"), "{refusal}");
    let active = control("GET", "misbehave", "").await.1;
    assert_eq!(active, serde_json::json!(["small-pages=1", "refuse-query=LIKE"]));
    assert_eq!(control("DELETE", "misbehave", "").await.0, 200);
    assert!(account.wire().misbehaviours().is_empty());
}

/// Sends a batch without the atomic flag. Returns its status and that of each operation.
async fn send_bulk(account: &LocalAccount, served: &Served, continues: bool, operations: &Value) -> (u16, Vec<u64>) {
    let mut headers = raw_http::signed(account.key(), "post", "docs", "dbs/db/colls/items");
    headers.push(("x-ms-cosmos-is-batch-request", "true".to_owned()));
    headers.push(("x-ms-cosmos-batch-continue-on-error", continues.to_string()));
    headers.push(("x-ms-documentdb-partitionkeyrangeid", "0".to_owned()));
    let body = operations.to_string();
    let (status, body) = raw_http::send(served, "POST", "/dbs/db/colls/items/docs", &headers, &body).await;
    let results: Vec<Value> = serde_json::from_str(&body).unwrap();
    (status.unwrap(), results.iter().map(|result| result["statusCode"].as_u64().unwrap()).collect())
}

#[tokio::test]
async fn a_batch_without_the_atomic_flag_runs_its_operations_one_by_one() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    let served = serve(&account).await;
    let create = |pk: &str, id: &str| {
        let partition_key = format!("[\"{pk}\"]");
        let body = item(pk, id, 1);
        serde_json::json!({ "operationType": "Create", "partitionKey": partition_key, "resourceBody": body })
    };
    let delete = serde_json::json!({ "operationType": "Delete", "partitionKey": "[\"q\"]", "id": "2" });

    let operations = Value::from(vec![create("p", "1"), create("p", "1"), create("q", "2")]);
    assert_eq!(send_bulk(&account, &served, false, &operations).await, (207, vec![201, 409, 424]));
    assert!(read(&container, "p", "1").await.is_some());
    assert_eq!(send_bulk(&account, &served, true, &operations).await, (207, vec![409, 409, 201]));
    let operations = Value::from(vec![delete.clone(), create("p", "3")]);
    assert_eq!(send_bulk(&account, &served, true, &operations).await, (200, vec![204, 201]));
    assert_eq!(send_bulk(&account, &served, true, &Value::from(vec![delete])).await, (207, vec![404]));
    assert_eq!(query(&container, "SELECT * FROM c").await.len(), 2);
}

#[tokio::test]
async fn only_loopback_addresses_are_served() {
    let account = LocalAccount::new();
    let refused = account.serve(SocketAddr::from(([0, 0, 0, 0], 0))).await;
    assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
}

#[tokio::test]
async fn the_server_stops_although_a_request_is_held() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let gate = Gate::new();
    let hold = WireAction::HoldBefore(gate.clone());
    account.wire().add(WireRule::new(hold));
    let addr = served.addr();
    let headers = raw_http::signed(account.key(), "get", "", "");
    let request = raw_http::send(&served, "GET", "/", &headers, "");
    let shutdown = async {
        gate.reached().await;
        addr
    };
    tokio::select! {
        _ = request => panic!("the request is held"),
        addr = shutdown => assert_eq!(addr, served.addr()),
    }
    served.shutdown().await;
    assert!(tokio::net::TcpStream::connect(addr).await.is_err());
}
