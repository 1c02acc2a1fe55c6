//! The settings and their values.

use super::{CosmosDBProviderConfig, Retention, Throughput, LONGEST_INTERVAL};
use crate::{
    credential::{Cloud, Credential},
    model::{Clock, EqualShares, LeaseProvider, Randomness},
};
use azure_data_cosmos::{options::Region, RoutingStrategy};
use std::{sync::Arc, time::Duration};

/// # Settings
impl CosmosDBProviderConfig {
    /// Sets the account's endpoint, `https://<account>.documents.azure.com/`. A connection string has its own endpoint.
    ///
    /// Plain `http://` is allowed only for an emulator on this machine, or on the host that
    /// `AZURE_COSMOS_EMULATOR_HOST` names.
    #[must_use]
    pub fn with_endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoint = Some(endpoint.into());
        self
    }

    /// Sets the credential.
    ///
    /// ```
    /// use duroxide_cosmos::{CosmosDBProviderConfig, Credential};
    ///
    /// let config = CosmosDBProviderConfig::default().with_credential(Credential::developer_tools());
    /// ```
    #[must_use]
    pub fn with_credential(mut self, credential: impl Into<Credential>) -> Self {
        self.credential = Some(credential.into());
        self
    }

    /// Sets the Azure cloud whose Entra ID issues tokens. By default the endpoint determines it.
    #[must_use]
    pub fn with_cloud(mut self, cloud: Cloud) -> Self {
        self.cloud = cloud;
        self
    }

    /// Sets the scope of Entra ID tokens. The default is `https://cosmos.azure.com/.default` in the public cloud and
    /// `https://<account host>/.default` in others.
    #[must_use]
    pub fn with_token_scope(mut self, scope: impl Into<String>) -> Self {
        self.token_scope = Some(scope.into());
        self
    }

    /// Sets the database, `duroxide` by default.
    #[must_use]
    pub fn with_database(mut self, database: impl Into<String>) -> Self {
        self.database = database.into();
        self
    }

    /// Sets the container, `duroxide` by default.
    #[must_use]
    pub fn with_container(mut self, container: impl Into<String>) -> Self {
        self.container = container.into();
        self
    }

    /// Sets the Azure region of this process, or the nearest one. The SDK reads from the account's regions in the
    /// order of their distance from it.
    ///
    /// If the SDK does not know the name, it tries that region first and then follows the account's order. Writes
    /// always go to the account's write region.
    #[must_use]
    pub fn with_region(self, region: impl Into<String>) -> Self {
        self.with_preferred_regions([region])
    }

    /// Sets the account's regions in the order in which to read from them. An empty list, the default, is the account's
    /// own order.
    ///
    /// Both notations of Azure are accepted: `West Europe` and `westeurope`.
    #[must_use]
    pub fn with_preferred_regions<R: Into<String>>(mut self, regions: impl IntoIterator<Item = R>) -> Self {
        self.regions = regions.into_iter().map(|region| Region::new(region.into())).collect();
        self
    }

    /// Sets whether the provider creates the database and the container if they are missing.
    ///
    /// The default is `true` with an account key and `false` otherwise. An Entra ID identity can create neither on the
    /// data plane, whatever its role: the service answers 403.
    #[must_use]
    pub fn with_create_if_missing(mut self, create: bool) -> Self {
        self.create_if_missing = Some(create);
        self
    }

    /// Sets the throughput of a container that the provider creates. An existing container keeps its own.
    #[must_use]
    pub fn with_throughput(mut self, throughput: Throughput) -> Self {
        self.throughput = throughput;
        self
    }

    /// Sets the age at which an undelivered message counts as left behind, 2 s by default. Then other processes may
    /// deliver it.
    #[must_use]
    pub fn with_reconciler_age_threshold(mut self, age: Duration) -> Self {
        self.reconciler_age_threshold = age;
        self
    }

    /// Sets the time limit of one HTTP attempt, 3 s by default.
    ///
    /// Keep it below the lock timeouts of the runtime, 5 s for a turn by default. An attempt that outlives the lock can
    /// neither be repeated nor reported in time. Queries get at least 7 s, because a page may take 5 s on the server.
    #[must_use]
    pub fn with_request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// Sets the time limit of a call without its own deadline, including all its attempts, 10 s by default.
    #[must_use]
    pub fn with_operation_timeout(mut self, timeout: Duration) -> Self {
        self.operation_timeout = timeout;
        self
    }

    /// Sets how often an idle worker reads its wake-up document, 250 ms by default.
    ///
    /// The interval limits how soon the worker notices work from other processes. It notices work from its own
    /// process at once. A read takes one request of 1 RU, for any number of partitions and workers. At the default
    /// that is 4 RU/s for each worker (estimate from published prices, not measured on Azure).
    #[must_use]
    pub fn with_wakeup_interval(mut self, interval: Duration) -> Self {
        self.wakeup_interval = interval.min(LONGEST_INTERVAL);
        self
    }

    /// Sets how often an idle worker polls one physical partition for all due work, 3 s by default. With more workers
    /// than partitions, each of them polls less often.
    ///
    /// The poll finds work without a wake-up: timers and undelivered messages of a process that died, and work whose
    /// wake-up was lost. A poll is one request of about 3 RU (estimate from published prices, not measured on Azure).
    #[must_use]
    pub fn with_poll_interval(mut self, interval: Duration) -> Self {
        self.poll_interval = interval.min(LONGEST_INTERVAL);
        self
    }

    /// Sets whether the provider claims new work in the batch that creates it, if a local dispatcher is waiting. On by
    /// default.
    ///
    /// Such a batch is a start, the completion of an activity, or a turn that schedules activities. The claim then
    /// takes no request of its own.
    #[must_use]
    pub fn with_inline_claims(mut self, on: bool) -> Self {
        self.inline_claims = on;
        self
    }

    /// Sets how long ended instances stay. They stay for ever by default.
    ///
    /// One of the idle workers deletes older instances, one instance tree at a time, and only after the whole tree has
    /// ended. The current setting also applies to instances that ended before it was made. Give every process the same
    /// setting.
    #[must_use]
    pub fn with_retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Sets the [`LeaseProvider`] that chooses the slots of this process, [`EqualShares`] by default.
    #[must_use]
    pub fn with_leases(mut self, leases: impl LeaseProvider + 'static) -> Self {
        self.leases = Some(Arc::new(leases));
        self
    }

    /// Sets the memory for cached histories, 64 MiB by default. 0 turns the cache off.
    #[must_use]
    pub fn with_history_cache_bytes(mut self, bytes: usize) -> Self {
        self.history_cache_bytes = bytes;
        self
    }

    /// Sets the age up to which the provider answers a read of an instance from memory, 50 ms by default. With zero
    /// it asks the service every time.
    ///
    /// The provider's own writes are visible at once. A client that waits for an orchestration reads it every few
    /// milliseconds, and each activity reads it when it starts. The setting saves a request for each of these reads. An
    /// answer may be ten times as old while the next turn or activity of the instance waits or runs in this process.
    #[must_use]
    pub fn with_read_staleness(mut self, staleness: Duration) -> Self {
        self.read_staleness = staleness;
        self
    }

    /// Sets the text behind the SDK's user agent in the account's logs, `duroxide-cosmos` by default. It has at most 25
    /// letters, digits, `-`, `_`, `.` and `~`.
    #[must_use]
    pub fn with_user_agent_suffix(mut self, suffix: impl Into<String>) -> Self {
        self.user_agent_suffix = suffix.into();
        self
    }

    /// Sets the source of the time of day, the system clock by default: for tests and simulations.
    ///
    /// Locks, timers and Entra ID tokens expire by this clock. The clocks of all processes that share a container must
    /// roughly agree.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// Sets the source of lock tokens and jitter, the operating system by default: for tests and simulations.
    ///
    /// With a seed and a single-threaded runtime, a provider sends the same requests for the same calls and answers.
    ///
    /// ```
    /// use duroxide_cosmos::{Clock, CosmosDBProviderConfig, Randomness};
    ///
    /// let config = CosmosDBProviderConfig::default()
    ///     .with_clock(Clock::from_fn(|| 1_763_256_000_000))
    ///     .with_randomness(Randomness::seeded(7));
    /// ```
    #[must_use]
    pub fn with_randomness(mut self, randomness: Randomness) -> Self {
        self.randomness = randomness;
        self
    }
}

/// # Values
impl CosmosDBProviderConfig {
    /// The account's endpoint: the one that was set, or that of the connection string.
    pub fn endpoint(&self) -> Option<&str> {
        let of_credential = || self.credential.as_ref().and_then(Credential::endpoint);
        self.endpoint.as_deref().or_else(of_credential)
    }

    /// The credential, if one was set.
    pub fn credential(&self) -> Option<&Credential> {
        self.credential.as_ref()
    }

    /// The Azure cloud whose Entra ID issues tokens.
    pub fn cloud(&self) -> &Cloud {
        &self.cloud
    }

    /// The scope of Entra ID tokens, if one was set.
    pub fn token_scope(&self) -> Option<&str> {
        self.token_scope.as_deref()
    }

    /// The name of the database.
    pub fn database(&self) -> &str {
        &self.database
    }

    /// The name of the container.
    pub fn container(&self) -> &str {
        &self.container
    }

    /// The regions that were set, in order.
    pub fn preferred_regions(&self) -> &[Region] {
        &self.regions
    }

    /// The regions as the SDK expects them. No region is the account's own order, one region is the proximity to it,
    /// and several are a fixed order.
    pub fn routing_strategy(&self) -> RoutingStrategy {
        match self.regions.as_slice() {
            [only] if is_known_to_sdk(only) => RoutingStrategy::ProximityTo(only.clone()),
            regions => RoutingStrategy::PreferredRegions(regions.to_vec()),
        }
    }

    /// Whether the provider creates the database and the container if they are missing. By default only with an account
    /// key.
    pub fn create_if_missing(&self) -> bool {
        let by_credential = || self.credential.as_ref().is_some_and(Credential::is_key);
        self.create_if_missing.unwrap_or_else(by_credential)
    }

    /// The throughput of a container that the provider creates.
    pub fn throughput(&self) -> Throughput {
        self.throughput
    }

    /// The age at which an undelivered message counts as left behind.
    pub fn reconciler_age_threshold(&self) -> Duration {
        self.reconciler_age_threshold
    }

    /// The time limit of one HTTP attempt.
    pub fn request_timeout(&self) -> Duration {
        self.request_timeout
    }

    /// The time limit of a call without its own deadline.
    pub fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    /// The interval at which an idle worker reads its wake-up document.
    pub fn wakeup_interval(&self) -> Duration {
        self.wakeup_interval
    }

    /// The interval at which an idle worker polls one physical partition for all due work.
    pub fn poll_interval(&self) -> Duration {
        self.poll_interval
    }

    /// Whether the provider claims new work in the batch that creates it.
    pub fn inline_claims(&self) -> bool {
        self.inline_claims
    }

    /// How long ended instances stay.
    pub fn retention(&self) -> &Retention {
        &self.retention
    }

    /// The lease provider that chooses the slots of this process.
    pub fn leases(&self) -> &dyn LeaseProvider {
        self.leases.as_deref().unwrap_or(&EqualShares)
    }

    /// The application's own [`LeaseProvider`], if one was set.
    pub(crate) fn own_leases(&self) -> Option<&Arc<dyn LeaseProvider>> {
        self.leases.as_ref()
    }

    /// The memory for cached histories, in bytes.
    pub fn history_cache_bytes(&self) -> usize {
        self.history_cache_bytes
    }

    /// The age up to which the provider answers a read from memory.
    pub fn read_staleness(&self) -> Duration {
        self.read_staleness
    }

    /// The text behind the SDK's user agent.
    pub fn user_agent_suffix(&self) -> &str {
        &self.user_agent_suffix
    }

    /// The source of the time of day.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The source of lock tokens and jitter.
    pub fn randomness(&self) -> &Randomness {
        &self.randomness
    }

    /// The kind of credential, for error messages.
    pub(crate) fn credential_kind(&self) -> String {
        let kind = self.credential.as_ref().map(Credential::kind);
        kind.map_or_else(|| "none".into(), |kind| kind.into_owned())
    }
}

/// Whether the SDK knows a region. Proximity to an unknown region would be no preference at all. The SDK has a
/// display name for each region that it knows, and repeats the normalised name for the others.
fn is_known_to_sdk(region: &Region) -> bool {
    region.display_name() != region.as_str()
}
