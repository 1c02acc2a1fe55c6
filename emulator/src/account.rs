//! The local account: it creates clients, and a test reads its counters, documents and partitions.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use azure_core::credentials::Secret;
use azure_core::http::{headers::Headers, Method, Url};
use azure_core::Bytes;
use azure_data_cosmos::fault_injection::FaultInjectionRule;
use azure_data_cosmos::options::ConnectionPoolOptions;
use azure_data_cosmos::{
    AccountEndpoint, AccountReference, CosmosClient, CosmosClientBuilder, CosmosError, CosmosRuntimeBuilder,
    RoutingStrategy,
};
use azure_data_cosmos_driver::in_memory_emulator::EmulatorStore;
use azure_data_cosmos_driver::CosmosDriverRuntimeBuilder;
use futures::FutureExt;
use serde_json::{json, Value};

use crate::builder::LocalAccountBuilder;
use crate::names::{ContainerName, ItemKey};
use crate::request::{encode, Outgoing, CONTINUATION, IS_UPSERT, PARTITION_KEY};
use crate::serve::{self, Served};
use crate::stats::Stats;
use crate::transport::WireFactory;
use crate::wire::Wire;

/// A Cosmos DB account in memory. Clones share the same account.
#[derive(Clone)]
pub struct LocalAccount {
    state: Arc<AccountState>,
}

struct AccountState {
    wire: Arc<Wire>,
    endpoint: Url,
    key: Secret,
    tokens: Mutex<BearerTokens>,
}

/// The bearer tokens that the account accepts or recognises over HTTP.
#[derive(Default)]
struct BearerTokens {
    accepted: BTreeSet<String>,
    /// Tokens of identities without a role assignment.
    known: BTreeSet<String>,
    any: bool,
}

impl Default for LocalAccount {
    fn default() -> Self {
        Self::new()
    }
}

impl LocalAccount {
    /// Creates an empty account: one region, one physical partition per container, no latency, no throttling.
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// Returns a builder for an account.
    pub fn builder() -> LocalAccountBuilder {
        LocalAccountBuilder::default()
    }

    pub(crate) fn from_parts(wire: Arc<Wire>, endpoint: Url, key: Secret) -> Self {
        let state = AccountState { wire, endpoint, key, tokens: Mutex::default() };
        Self { state: Arc::new(state) }
    }

    /// Creates a client named "client".
    pub async fn client(&self) -> CosmosClient {
        self.client_named("client").await
    }

    /// Creates a client with the SDK's defaults and its own caches. Statistics and rules identify its requests by
    /// `name`.
    ///
    /// # Panics
    ///
    /// If the account can't be reached, for example because a rule refuses the first request.
    pub async fn client_named(&self, name: &str) -> CosmosClient {
        self.client_with(name, Vec::new(), |builder| builder).await.expect("a client of a local account can be built")
    }

    /// Creates a client with the SDK's own fault rules, which act above the wire, and with further options.
    pub async fn client_with(
        &self,
        name: &str,
        rules: Vec<Arc<FaultInjectionRule>>,
        configure: impl FnOnce(CosmosClientBuilder) -> CosmosClientBuilder,
    ) -> Result<CosmosClient, CosmosError> {
        let pool = ConnectionPoolOptions::default();
        self.client_with_pool(name, pool, rules, configure).await
    }

    /// Like [`client_with`](Self::client_with), with connection pool options. Their request timeouts apply as they do
    /// over HTTP.
    pub async fn client_with_pool(
        &self,
        name: &str,
        pool: ConnectionPoolOptions,
        rules: Vec<Arc<FaultInjectionRule>>,
        configure: impl FnOnce(CosmosClientBuilder) -> CosmosClientBuilder,
    ) -> Result<CosmosClient, CosmosError> {
        let runtime = self.runtime_builder(name).with_connection_pool(pool);
        let builder =
            CosmosClientBuilder::new().with_runtime(runtime.build().await?).with_fault_injection_rules(rules)?;
        configure(builder).build(self.reference(), RoutingStrategy::PreferredRegions(Vec::new())).await
    }

    /// Returns a builder for an SDK runtime that is connected to this account, for callers that build their own client.
    /// Use it with [`reference`](Self::reference), and build a new runtime for each client.
    pub fn runtime_builder(&self, name: &str) -> CosmosRuntimeBuilder {
        let factory = WireFactory { wire: Arc::clone(&self.state.wire), client: Arc::from(name) };
        CosmosDriverRuntimeBuilder::new().with_mock_http_client_factory(Arc::new(factory)).into()
    }

    /// Returns the account's endpoint and key, for a client in this process.
    pub fn reference(&self) -> AccountReference {
        AccountReference::with_authentication_key(self.endpoint(), self.state.key.clone())
    }

    /// Returns the account's endpoint, for a client in this process. No server listens there.
    pub fn endpoint(&self) -> AccountEndpoint {
        AccountEndpoint::from(self.state.endpoint.clone())
    }

    /// Returns the account key, in base64.
    pub fn key(&self) -> &str {
        self.state.key.secret()
    }

    /// Returns the counters since the account was built or the counters were reset.
    pub fn stats(&self) -> Stats {
        self.state.wire.counters().all()
    }

    /// Returns the counters of one client. Over HTTP a client's name is the suffix of its user agent.
    pub fn stats_of(&self, client: &str) -> Stats {
        self.state.wire.counters().of_client(client)
    }

    /// Sets the counters to zero.
    pub fn reset_stats(&self) {
        self.state.wire.counters().reset();
    }

    /// Returns the wire, on which a test adds rules and misbehaviours.
    pub fn wire(&self) -> &Wire {
        &self.state.wire
    }

    /// Returns the store of the SDK's emulator, for functions that this type does not cover: failovers, paused
    /// replication.
    pub fn store(&self) -> Arc<EmulatorStore> {
        Arc::clone(self.state.wire.service().store())
    }

    /// Splits a physical partition in the middle of its range and waits until the split is done. Returns the new
    /// partitions.
    pub async fn split(&self, database: &str, container: &str, partition: u32) -> Result<Vec<u32>, CosmosError> {
        let store = self.store();
        let middle = store.midpoint_split_epk(database, container, partition)?;
        store.split_partition_and_wait(database, container, partition, middle, Duration::ZERO).await
    }

    /// Merges two adjacent physical partitions and waits until the merge is done. Returns the new partition.
    ///
    /// As on the service, a query that names one of the old partitions is answered 400 after the merge.
    pub async fn merge(&self, database: &str, container: &str, a: u32, b: u32) -> Result<u32, CosmosError> {
        let store = self.store();
        let merged = store.merge_partitions_and_wait(database, container, a, b, Duration::ZERO).await?;
        let name = ContainerName::new(database, container);
        self.state.wire.merged_ranges().add(&name, [a, b]);
        Ok(merged)
    }

    /// Returns the ids of a container's physical partitions. The list is empty if the container does not exist.
    pub fn partitions(&self, database: &str, container: &str) -> Vec<u32> {
        let ranges = self.read_ranges(database, container).unwrap_or_default();
        let id = |range: &Value| range.get("id")?.as_str()?.parse().ok();
        ranges.iter().filter_map(id).collect()
    }

    /// Returns the number of physical partitions of a container, or zero if the container does not exist.
    pub fn partition_count(&self, database: &str, container: &str) -> usize {
        self.partitions(database, container).len()
    }

    /// Returns every document of a container, as stored in the write region at this moment. The list is empty if the
    /// container does not exist.
    pub fn documents(&self, database: &str, container: &str) -> Vec<Value> {
        let mut documents = Vec::new();
        let mut headers = Headers::new();
        while let Some((mut page, next)) = self.read_feed(database, container, "docs", "Documents", headers) {
            documents.append(&mut page);
            let Some(next) = next else { break };
            headers = Headers::new();
            headers.insert(CONTINUATION, next);
        }
        let default_ttl = self.default_ttl(database, container);
        documents.retain(|document| !self.state.wire.is_expired(default_ttl, document));
        documents
    }

    /// Stores a document in a container and bypasses the wire: the account does not count the request, and rules do not
    /// match it. Returns false if the emulator refuses the document.
    pub async fn put(&self, database: &str, container: &str, partition_key: &str, document: &Value) -> bool {
        let name = ContainerName::new(database, container);
        let partition_key = json!([partition_key]).to_string();
        let (wire, service) = (&self.state.wire, self.state.wire.service());
        let Some(mut request) = service.request(Method::Post, &format!("{}/docs", name.path())) else { return false };
        request.headers.insert(PARTITION_KEY, partition_key.clone());
        request.headers.insert(IS_UPSERT, "true");
        request.body = Bytes::from(document.to_string());
        let is_stored = service.forward(&request).await.is_ok_and(|answer| answer.is_success());
        if is_stored {
            let key = ItemKey::new(name, &partition_key, document["id"].as_str().unwrap_or_default());
            wire.accounting().put(service, &key, document).await;
        }
        is_stored
    }

    /// Reads the default time to live of a container. The store answers at once, as in `read_feed`.
    fn default_ttl(&self, database: &str, container: &str) -> Option<i64> {
        let name = ContainerName::new(database, container);
        let wire = &self.state.wire;
        wire.accounting().default_ttl(wire.service(), &name).now_or_never().flatten()
    }

    fn read_ranges(&self, database: &str, container: &str) -> Option<Vec<Value>> {
        self.read_feed(database, container, "pkranges", "PartitionKeyRanges", Headers::new()).map(|(ranges, _)| ranges)
    }

    /// Reads one page of a feed and the continuation of the next page. Bypasses the wire: the request is not counted
    /// and no rule matches it. The emulator reads a feed without waiting, so the future is ready at its first poll.
    fn read_feed(
        &self,
        database: &str,
        container: &str,
        feed: &str,
        list: &str,
        headers: Headers,
    ) -> Option<(Vec<Value>, Option<String>)> {
        let mut url = self.state.endpoint.clone();
        url.set_path(&format!("/dbs/{}/colls/{}/{feed}", encode(database), encode(container)));
        let request = Outgoing { client: None, method: Method::Get, url, headers, body: Bytes::new() };
        let answer = self.state.wire.service().forward(&request);
        let answer = answer.now_or_never()?.ok()?;
        let next = answer.headers.get_optional_str(&CONTINUATION).map(str::to_owned);
        let mut body: Value = serde_json::from_slice(&answer.body).ok()?;
        Some((serde_json::from_value(body.get_mut(list)?.take()).ok()?, next))
    }

    /// Accepts this bearer token over HTTP, as that of an identity with the built-in data contributor role.
    pub fn accept_token(&self, token: impl Into<String>) {
        self.with_tokens(|tokens| tokens.accepted.insert(token.into()));
    }

    /// Recognises this bearer token over HTTP as that of an identity without a role. Requests with it are answered
    /// 403/5301. Requests with an unknown token are answered 401.
    pub fn know_token(&self, token: impl Into<String>) {
        self.with_tokens(|tokens| tokens.known.insert(token.into()));
    }

    /// Accepts any bearer token over HTTP.
    pub fn accept_any_token(&self) {
        self.with_tokens(|tokens| tokens.any = true);
    }

    /// Stops accepting this bearer token over HTTP.
    pub fn refuse_token(&self, token: &str) {
        self.with_tokens(|tokens| tokens.accepted.remove(token));
    }

    pub(crate) fn accepts(&self, token: &str) -> bool {
        self.with_tokens(|tokens| tokens.any || tokens.accepted.contains(token))
    }

    pub(crate) fn knows(&self, token: &str) -> bool {
        self.with_tokens(|tokens| tokens.known.contains(token))
    }

    pub(crate) fn secret(&self) -> &Secret {
        &self.state.key
    }

    pub(crate) fn shared_wire(&self) -> &Arc<Wire> {
        &self.state.wire
    }

    fn with_tokens<R>(&self, change: impl FnOnce(&mut BearerTokens) -> R) -> R {
        let tokens = self.state.tokens.lock();
        change(&mut tokens.unwrap_or_else(PoisonError::into_inner))
    }

    /// Serves the account over HTTP/1.1 and HTTP/2 without TLS, on a loopback address. Port 0 selects a free port.
    ///
    /// Over HTTP the account checks credentials as the service does. It shows only its write region.
    pub async fn serve(&self, addr: SocketAddr) -> io::Result<Served> {
        serve::serve(self.clone(), addr, None).await
    }

    /// Like [`serve`](Self::serve), for one client: the account counts every request on this address as a request of
    /// `client`. A test can thus tell worker processes apart, whatever their user agents are.
    pub async fn serve_client(&self, addr: SocketAddr, client: &str) -> io::Result<Served> {
        serve::serve(self.clone(), addr, Some(client)).await
    }
}

/// Leaves out the key and the tokens.
impl fmt::Debug for LocalAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalAccount")
            .field("endpoint", &self.state.endpoint.as_str())
            .field("wire", &self.state.wire)
            .finish_non_exhaustive()
    }
}
