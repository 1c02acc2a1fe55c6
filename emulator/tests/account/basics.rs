use std::time::Duration;

use azure_data_cosmos::models::{ContainerProperties, IndexingPolicy};
use azure_data_cosmos::options::{ConnectionPoolOptions, Region};
use azure_data_cosmos::{CosmosClientBuilder, RoutingStrategy, TransactionalBatch};
use duroxide_cosmos_emulator::{
    fault_injection::{
        FaultInjectionConditionBuilder, FaultInjectionErrorType, FaultInjectionResultBuilder,
        FaultInjectionRuleBuilder, FaultOperationType,
    },
    Gate, LocalAccount, RequestKind, WireAction, WireRule,
};

use serde_json::json;

use crate::fixture::*;

#[tokio::test]
async fn every_item_operation_works_in_process() {
    use_every_operation(&LocalAccount::new().client().await).await;
}

#[tokio::test]
async fn containers_have_the_configured_partitions_and_their_own_properties() {
    for partitions in [1, 3, 8] {
        let account = LocalAccount::builder().with_partitions(partitions).build();
        let client = account.client().await;
        let policy = IndexingPolicy::default().with_included_path("/value/?").with_excluded_path("/*");
        let properties = ContainerProperties::new(CONTAINER, "/pk".into()).with_indexing_policy(policy.clone());
        client.create_database(DATABASE, None).await.unwrap();
        let database = client.database_client(DATABASE);
        let created = database.create_container(properties.clone(), None).await.unwrap();
        assert_eq!(u16::from(created.status().status_code()), 201);

        assert_eq!(account.partition_count(DATABASE, CONTAINER), partitions as usize);
        let read = open_container(&client).await.read(None).await.unwrap();
        let read: ContainerProperties = read.into_model().unwrap();
        assert_eq!(read.indexing_policy, Some(policy));

        let again = database.create_container(properties, None).await;
        assert_eq!(status(&again.unwrap_err()), 409);
    }
}

#[tokio::test]
async fn a_query_reads_all_partitions() {
    let account = LocalAccount::builder().with_partitions(4).build();
    let container = create_container(&account.client().await).await;
    for n in 0..40 {
        let pk = format!("pk{n}");
        container.create_item(pk.clone(), "1", item(&pk, "1", n), None).await.unwrap();
    }
    let before = account.stats();
    let all = query(&container, "SELECT * FROM c ORDER BY c[\"value\"]").await;
    assert_eq!(all.iter().map(|i| i.value).collect::<Vec<_>>(), (0..40).collect::<Vec<_>>());
    let queries = (account.stats() - before).of(RequestKind::Query).requests;
    assert!(queries >= 4, "{queries} requests for four partitions");
}

#[tokio::test]
async fn ids_and_partition_keys_that_the_service_refuses_are_refused() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    for id in ["a/b", "a\\b", "a?b", "a#b", "", "a ", "a\tb", &"x".repeat(1024)] {
        let bad = item("p", id, 0);
        let created = container.create_item("p", id, &bad, None).await;
        assert_eq!(status(&created.unwrap_err()), 400, "create {id:?}");
        let upserted = container.upsert_item("p", id, &bad, None).await;
        assert_eq!(status(&upserted.unwrap_err()), 400, "upsert {id:?}");
        for batch in [
            TransactionalBatch::new("p").create_item(&bad).unwrap(),
            TransactionalBatch::new("p").upsert_item(item("p", "1", 0), None).unwrap().read_item(id.to_owned(), None),
            TransactionalBatch::new("p").read_item(id.to_owned(), None),
            TransactionalBatch::new("p").delete_item(id.to_owned(), None),
        ] {
            let batched = container.execute_transactional_batch(batch, None).await;
            assert_eq!(status(&batched.unwrap_err()), 400, "batch {id:?}");
        }
    }
    // The SDK drops an empty id and control characters from the path.
    for id in ["a/b", "a\\b", "a?b", "a#b", "a ", &"x".repeat(1024)] {
        let read = container.read_item("p", id, None).await;
        assert_eq!(status(&read.unwrap_err()), 400, "read {id:?}");
        let replaced = container.replace_item("p", id, item("p", id, 0), None).await;
        assert_eq!(status(&replaced.unwrap_err()), 400, "replace {id:?}");
        let deleted = container.delete_item("p", id, None).await;
        assert_eq!(status(&deleted.unwrap_err()), 400, "delete {id:?}");
    }
    let long = "k".repeat(2049);
    let created = container.create_item(long.clone(), "1", item(&long, "1", 0), None).await;
    assert_eq!(status(&created.unwrap_err()), 400);
    assert_eq!(query(&container, "SELECT * FROM c").await, []);
}

#[tokio::test]
async fn an_item_with_an_invalid_id_or_another_partition_key_is_refused() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    let items = [
        json!({ "pk": "p" }),
        json!({ "id": 1, "pk": "p" }),
        json!({ "id": null, "pk": "p" }),
        json!({ "id": "1", "pk": "q" }),
        json!({ "id": "1" }),
    ];
    for bad in items {
        let mismatch = bad["id"] == "1";
        let created = container.create_item("p", "1", &bad, None).await;
        let upserted = container.upsert_item("p", "1", &bad, None).await;
        let batch = TransactionalBatch::new("p").create_item(&bad).unwrap();
        let batched = container.execute_transactional_batch(batch, None).await;
        for error in [created.unwrap_err(), upserted.unwrap_err(), batched.unwrap_err()] {
            assert_eq!(status(&error), 400, "{bad}: {error}");
            let substatus = error.status().sub_status().map(|code| code.value());
            assert_eq!(substatus.filter(|code| *code == 1001).is_some(), mismatch, "{bad}: {error}");
        }
    }
    container.create_item("p", "1", item("p", "1", 0), None).await.unwrap();
    let moved = container.replace_item("p", "1", item("q", "1", 0), None).await.unwrap_err();
    assert_eq!(status(&moved), 400);
    assert_eq!(query(&container, "SELECT * FROM c").await, [item("p", "1", 0)]);
}

#[tokio::test]
async fn ids_and_partition_keys_of_the_maximum_length_are_accepted() {
    let container = create_container(&LocalAccount::new().client().await).await;
    let (pk, id) = ("k".repeat(2048), "x".repeat(1023));
    container.create_item(pk.clone(), &id, item(&pk, &id, 1), None).await.unwrap();
    assert!(read(&container, &pk, &id).await.is_some());
}

#[tokio::test]
async fn items_and_batches_over_2_mb_are_refused_with_413() {
    let container = create_container(&LocalAccount::new().client().await).await;
    let large = |size: usize| serde_json::json!({ "id": "1", "pk": "p", "text": "t".repeat(size) });
    let created = container.create_item("p", "1", large(2 << 20), None).await;
    assert_eq!(status(&created.unwrap_err()), 413);
    let mut batch = TransactionalBatch::new("p");
    for _ in 0..3 {
        batch = batch.upsert_item(large(1 << 20), None).unwrap();
    }
    let batched = container.execute_transactional_batch(batch, None).await;
    assert_eq!(status(&batched.unwrap_err()), 413);
    let mut batch = TransactionalBatch::new("p");
    for _ in 0..101 {
        batch = batch.upsert_item(item("p", "1", 0), None).unwrap();
    }
    let batched = container.execute_transactional_batch(batch, None).await;
    assert_eq!(status(&batched.unwrap_err()), 400);
}

#[tokio::test]
async fn a_batch_that_only_reads_is_a_read_and_goes_to_the_write_region() {
    let account = LocalAccount::builder().with_regions(&["East US", "West US"]).build();
    let container = create_container(&account.client_named("one").await).await;
    account.store().pause_replication("West US");
    let created = container.create_item("p", "1", item("p", "1", 7), None).await.unwrap();
    account.reset_stats();

    let runtime = account.runtime_builder("away").build().await.unwrap();
    let away = RoutingStrategy::PreferredRegions(vec![Region::new("West US"), Region::new("East US")]);
    let client = CosmosClientBuilder::new().with_runtime(runtime).build(account.reference(), away).await.unwrap();
    let container = open_container(&client).await;
    let rule = WireRule::new(WireAction::Delay(Duration::ZERO)).on(RequestKind::Read);
    let seen = account.wire().add(rule.matching(|request| request.document_id == Some("1")));
    let batch = TransactionalBatch::new("p").read_item("1", None);
    let answer = container.execute_transactional_batch(batch, None).await.unwrap();
    let region = answer.diagnostics().requests().last().and_then(|request| request.region().cloned());
    assert_eq!(region, Some(Region::new("East US")));
    let answer = answer.into_model().unwrap();
    let result = &answer.results()[0];
    assert_eq!(result.into_model::<Item>().unwrap(), Some(item("p", "1", 7)));
    assert_eq!(result.etag(), created.headers().etag().map(|etag| etag.to_string()).as_deref());
    let stats = account.stats_of("away");
    assert_eq!((stats.of(RequestKind::Read).requests, stats.of(RequestKind::Batch).requests), (1, 0));
    assert_eq!(seen.hits(), 1);

    let batch = TransactionalBatch::new("p").read_item("1", None).upsert_item(item("p", "2", 0), None).unwrap();
    container.execute_transactional_batch(batch, None).await.unwrap();
    assert_eq!(account.stats_of("away").of(RequestKind::Batch).requests, 1, "this batch writes");
}

#[tokio::test]
async fn requests_are_counted_by_kind_and_client() {
    let account = LocalAccount::new();
    let one = create_container(&account.client_named("one").await).await;
    let two = open_container(&account.client_named("two").await).await;
    account.reset_stats();
    one.create_item("p", "1", item("p", "1", 0), None).await.unwrap();
    for _ in 0..3 {
        read(&two, "p", "1").await;
    }
    assert_eq!(read(&two, "p", "missing").await, None);

    let stats = account.stats();
    assert_eq!(stats.of(RequestKind::Create).requests, 1);
    assert_eq!(stats.of(RequestKind::Read).requests, 4);
    assert_eq!(stats.of(RequestKind::Read).failures, 1);
    assert_eq!(stats.items().requests, 5);
    assert!(stats.of(RequestKind::Create).charge > stats.of(RequestKind::Read).charge / 4.0);
    assert!(stats.of(RequestKind::Create).request_bytes > 0);
    assert_eq!(account.stats_of("two").of(RequestKind::Create).requests, 0);
    assert_eq!(account.stats_of("two").of(RequestKind::Read).requests, 4);
    assert_eq!((account.stats() - stats).total().requests, 0);
    let json = serde_json::to_value(account.stats()).unwrap();
    assert_eq!(json["read"]["requests"], 4);
}

#[tokio::test]
async fn a_client_works_across_the_split_of_a_partition() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    for n in 0..20 {
        let pk = format!("pk{n}");
        container.create_item(pk.clone(), "1", item(&pk, "1", n), None).await.unwrap();
    }
    let children = account.split(DATABASE, CONTAINER, 0).await.unwrap();
    assert_eq!(account.partitions(DATABASE, CONTAINER), children);
    for n in 0..20 {
        assert!(read(&container, &format!("pk{n}"), "1").await.is_some());
    }
    assert_eq!(query(&container, "SELECT * FROM c").await.len(), 20);
    assert!(account.split(DATABASE, CONTAINER, 0).await.is_err());
}

#[tokio::test]
async fn the_sdks_own_fault_rules_act_above_the_wire() {
    let account = LocalAccount::new();
    create_container(&account.client().await).await;
    let result = FaultInjectionResultBuilder::new().with_error(FaultInjectionErrorType::TooManyRequests).build();
    let condition = FaultInjectionConditionBuilder::new().with_operation_type(FaultOperationType::CreateItem).build();
    let rule = FaultInjectionRuleBuilder::new("throttle", result).with_condition(condition).with_hit_limit(1).build();
    let rule = std::sync::Arc::new(rule);
    let client = account.client_with("faulty", vec![rule], |builder| builder).await.unwrap();
    let container = open_container(&client).await;
    container.create_item("p", "1", item("p", "1", 0), None).await.unwrap();
    // The throttled request never reached the wire.
    assert_eq!(account.stats_of("faulty").of(RequestKind::Create).requests, 1);
}

#[tokio::test]
async fn a_request_that_timed_out_at_the_client_is_still_executed() {
    let account = LocalAccount::new();
    let other = create_container(&account.client().await).await;
    let pool = ConnectionPoolOptions::builder()
        .with_max_dataplane_request_timeout(Duration::from_millis(100))
        .build()
        .unwrap();
    let client = account.client_with_pool("hasty", pool, Vec::new(), |builder| builder).await.unwrap();
    let container = open_container(&client).await;
    let gate = Gate::new();
    let hold = WireAction::HoldBefore(gate.clone());
    account.wire().add(WireRule::new(hold).client("hasty"));
    let created = container.create_item("p", "1", item("p", "1", 7), None).await;
    created.unwrap_err();
    assert_eq!(read(&other, "p", "1").await, None);

    gate.open();
    while read(&other, "p", "1").await.is_none() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn containers_have_the_throughput_of_the_account_by_default() {
    let account = LocalAccount::builder().with_throughput(1000).build();
    let container = create_container(&account.client().await).await;
    let throughput = container.read_throughput(None).await.unwrap().unwrap();
    assert_eq!(throughput.throughput(), Some(1000));
}

#[tokio::test]
async fn another_region_lags_while_its_replication_is_paused() {
    let account = LocalAccount::builder().with_regions(&["East US", "West US"]).build();
    let east = create_container(&account.client_named("east").await).await;
    let runtime = account.runtime_builder("west").build().await.unwrap();
    let west = CosmosClientBuilder::new()
        .with_runtime(runtime)
        .build(account.reference(), RoutingStrategy::PreferredRegions(vec![Region::WEST_US]))
        .await
        .unwrap();
    let west = open_container(&west).await;

    account.store().pause_replication("West US");
    east.create_item("p", "1", item("p", "1", 1), None).await.unwrap();
    assert_eq!(read(&west, "p", "1").await, None);
    account.store().resume_replication("West US");
    account.store().drain_pending_replications().await;
    assert!(read(&west, "p", "1").await.is_some());
}
