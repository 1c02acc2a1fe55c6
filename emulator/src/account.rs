//! The account: where clients come from, and what a test can ask about it.

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
use crate::ledger::ItemKey;
use crate::request::{encode, Outgoing, CONTINUATION, IS_UPSERT, PARTITION_KEY};
use crate::serve::{self, Served};
use crate::service::ContainerName;
use crate::stats::Stats;
use crate::transport::WireFactory;
use crate::wire::Wire;

/// A Cosmos DB account in memory. Clones are the same account.
#[derive(Clone)]
pub struct LocalAccount {
    inner: Arc<Inner>,
}

struct Inner {
    wire: Arc<Wire>,
    endpoint: Url,
    key: Secret,
    tokens: Mutex<Tokens>,
}

/// The bearer tokens that the account takes over HTTP.
#[derive(Default)]
struct Tokens {
    accepted: BTreeSet<String>,
    /// Of identities without a role.
    known: BTreeSet<String>,
    any: bool,
}

impl Default for LocalAccount {
    fn default() -> Self {
        Self::new()
    }
}

impl LocalAccount {
    /// An empty account: one region, one physical partition a container, no latency, no throttling.
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// Sets up an account.
    pub fn builder() -> LocalAccountBuilder {
        LocalAccountBuilder::default()
    }

    pub(crate) fn from_parts(wire: Arc<Wire>, endpoint: Url, key: Secret) -> Self {
        let inner = Inner { wire, endpoint, key, tokens: Mutex::default() };
        Self { inner: Arc::new(inner) }
    }

    /// A client named "client".
    pub async fn client(&self) -> CosmosClient {
        self.client_named("client").await
    }

    /// A client whose requests can be told from others' by `name`, with the SDK's defaults and caches of its own.
    ///
    /// # Panics
    ///
    /// If the account can't be reached, as when a rule refuses the first request.
    pub async fn client_named(&self, name: &str) -> CosmosClient {
        self.client_with(name, Vec::new(), |builder| builder).await.expect("a client of a local account can be built")
    }

    /// A client with fault rules of the SDK's own, above the wire, and options of the caller's.
    pub async fn client_with(
        &self,
        name: &str,
        rules: Vec<Arc<FaultInjectionRule>>,
        configure: impl FnOnce(CosmosClientBuilder) -> CosmosClientBuilder,
    ) -> Result<CosmosClient, CosmosError> {
        let pool = ConnectionPoolOptions::default();
        self.client_with_pool(name, pool, rules, configure).await
    }

    /// Like [`client_with`](Self::client_with), with connection pool options too: their request timeouts hold here as
    /// they do over HTTP.
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

    /// An SDK runtime that is connected to this account, for callers that build their client themselves.
    /// Use it with [`reference`](Self::reference), and build a new one for each client.
    pub fn runtime_builder(&self, name: &str) -> CosmosRuntimeBuilder {
        let factory = WireFactory { wire: Arc::clone(&self.inner.wire), client: Arc::from(name) };
        CosmosDriverRuntimeBuilder::new().with_mock_http_client_factory(Arc::new(factory)).into()
    }

    /// The account's endpoint and key, for a client in this process.
    pub fn reference(&self) -> AccountReference {
        AccountReference::with_authentication_key(self.endpoint(), self.inner.key.clone())
    }

    /// The account's endpoint, for a client in this process; nothing listens there.
    pub fn endpoint(&self) -> AccountEndpoint {
        AccountEndpoint::from(self.inner.endpoint.clone())
    }

    /// The account key, in base64.
    pub fn key(&self) -> &str {
        self.inner.key.secret()
    }

    /// What went over the wire since the account was built or the counters were reset.
    pub fn stats(&self) -> Stats {
        self.inner.wire.counters().all()
    }

    /// What one client sent; over HTTP a client's name is its user agent's suffix.
    pub fn stats_of(&self, client: &str) -> Stats {
        self.inner.wire.counters().of_client(client)
    }

    /// Sets the counters to zero.
    pub fn reset_stats(&self) {
        self.inner.wire.counters().reset();
    }

    /// The wire, to make it misbehave.
    pub fn wire(&self) -> &Wire {
        &self.inner.wire
    }

    /// The SDK emulator's store, for what is not covered here: failovers, paused replication.
    pub fn store(&self) -> Arc<EmulatorStore> {
        Arc::clone(self.inner.wire.service().store())
    }

    /// Splits a physical partition in the middle of its range and waits until it is done. Returns the new partitions.
    pub async fn split(&self, database: &str, container: &str, partition: u32) -> Result<Vec<u32>, CosmosError> {
        let store = self.store();
        let middle = store.midpoint_split_epk(database, container, partition)?;
        store.split_partition_and_wait(database, container, partition, middle, Duration::ZERO).await
    }

    /// Merges two physical partitions that are neighbours and waits until it is done. Returns the new partition.
    ///
    /// As on the service, a query that still names one of the two is answered 400 from then on.
    pub async fn merge(&self, database: &str, container: &str, a: u32, b: u32) -> Result<u32, CosmosError> {
        let store = self.store();
        let merged = store.merge_partitions_and_wait(database, container, a, b, Duration::ZERO).await?;
        let name = ContainerName::new(database, container);
        self.inner.wire.merged().add(&name, [a, b]);
        Ok(merged)
    }

    /// The ids of a container's physical partitions; none if there is no such container.
    pub fn partitions(&self, database: &str, container: &str) -> Vec<u32> {
        let ranges = self.read_ranges(database, container).unwrap_or_default();
        let id = |range: &Value| range.get("id")?.as_str()?.parse().ok();
        ranges.iter().filter_map(id).collect()
    }

    /// How many physical partitions a container has; zero if there is no such container.
    pub fn partition_count(&self, database: &str, container: &str) -> usize {
        self.partitions(database, container).len()
    }

    /// Every document of a container as it is in the write region at this moment; none if there is no such container.
    pub fn documents(&self, database: &str, container: &str) -> Vec<Value> {
        let mut documents = Vec::new();
        let mut headers = Headers::new();
        while let Some((mut page, next)) = self.peek(database, container, "docs", "Documents", headers) {
            documents.append(&mut page);
            let Some(next) = next else { break };
            headers = Headers::new();
            headers.insert(CONTINUATION, next);
        }
        let default_ttl = self.default_ttl(database, container);
        documents.retain(|document| !self.inner.wire.is_expired(default_ttl, document));
        documents
    }

    /// Puts a document into a container past the wire: nobody counts it, and no rule meets it. False where the emulator
    /// does not take it.
    pub async fn put(&self, database: &str, container: &str, partition_key: &str, document: &Value) -> bool {
        let name = ContainerName::new(database, container);
        let partition_key = json!([partition_key]).to_string();
        let (wire, service) = (&self.inner.wire, self.inner.wire.service());
        let Some(mut request) = service.request(Method::Post, &format!("{}/docs", name.path())) else { return false };
        request.headers.insert(PARTITION_KEY, partition_key.clone());
        request.headers.insert(IS_UPSERT, "true");
        request.body = Bytes::from(document.to_string());
        let is_stored = service.forward(&request).await.is_ok_and(|answer| answer.is_success());
        if is_stored {
            let key = ItemKey::new(name, &partition_key, document["id"].as_str().unwrap_or_default());
            wire.records().put(service, &key, document).await;
        }
        is_stored
    }

    /// The store answers at once, as for `peek`.
    fn default_ttl(&self, database: &str, container: &str) -> Option<i64> {
        let name = ContainerName::new(database, container);
        let wire = &self.inner.wire;
        wire.records().default_ttl(wire.service(), &name).now_or_never().flatten()
    }

    fn read_ranges(&self, database: &str, container: &str) -> Option<Vec<Value>> {
        self.peek(database, container, "pkranges", "PartitionKeyRanges", Headers::new()).map(|(ranges, _)| ranges)
    }

    /// Reads a page of a feed, and where the next one begins. Asks the emulator past the wire, so that it neither counts nor
    /// meets a rule. Reading a feed waits for nothing, so the future is ready when it is first polled.
    fn peek(
        &self,
        database: &str,
        container: &str,
        feed: &str,
        list: &str,
        headers: Headers,
    ) -> Option<(Vec<Value>, Option<String>)> {
        let mut url = self.inner.endpoint.clone();
        url.set_path(&format!("/dbs/{}/colls/{}/{feed}", encode(database), encode(container)));
        let request = Outgoing { client: None, method: Method::Get, url, headers, body: Bytes::new() };
        let answer = self.inner.wire.service().forward(&request);
        let answer = answer.now_or_never()?.ok()?;
        let next = answer.headers.get_optional_str(&CONTINUATION).map(str::to_owned);
        let mut body: Value = serde_json::from_slice(&answer.body).ok()?;
        Some((serde_json::from_value(body.get_mut(list)?.take()).ok()?, next))
    }

    /// Takes this bearer token over HTTP, as an identity with the built-in data contributor role.
    pub fn accept_token(&self, token: impl Into<String>) {
        self.with_tokens(|tokens| tokens.accepted.insert(token.into()));
    }

    /// Knows this bearer token over HTTP as that of an identity without a role: it is answered 403/5301, others 401.
    pub fn know_token(&self, token: impl Into<String>) {
        self.with_tokens(|tokens| tokens.known.insert(token.into()));
    }

    /// Takes any bearer token over HTTP.
    pub fn accept_any_token(&self) {
        self.with_tokens(|tokens| tokens.any = true);
    }

    /// No longer takes this bearer token over HTTP.
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
        &self.inner.key
    }

    pub(crate) fn shared_wire(&self) -> &Arc<Wire> {
        &self.inner.wire
    }

    fn with_tokens<R>(&self, change: impl FnOnce(&mut Tokens) -> R) -> R {
        let tokens = self.inner.tokens.lock();
        change(&mut tokens.unwrap_or_else(PoisonError::into_inner))
    }

    /// Serves the account over HTTP/1.1 and HTTP/2 without TLS, on a loopback address; port 0 takes any that is free.
    ///
    /// Over HTTP the account checks credentials as the service does, and shows its write region only.
    pub async fn serve(&self, addr: SocketAddr) -> io::Result<Served> {
        serve::serve(self.clone(), addr, None).await
    }

    /// Like [`serve`](Self::serve), for one client alone: whatever comes this way is counted as `client`'s, so that the
    /// processes of a fleet can be told apart whatever their user agents say.
    pub async fn serve_client(&self, addr: SocketAddr, client: &str) -> io::Result<Served> {
        serve::serve(self.clone(), addr, Some(client)).await
    }
}

/// Without key and tokens.
impl fmt::Debug for LocalAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalAccount")
            .field("endpoint", &self.inner.endpoint.as_str())
            .field("wire", &self.inner.wire)
            .finish_non_exhaustive()
    }
}
