//! The provider's configuration.

mod env;
mod retention;

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use azure_data_cosmos::{
    options::{Region, UserAgentSuffix},
    AccountReference, RoutingStrategy,
};

use crate::{
    credential::{account_reference, endpoint, Cloud, Credential, Problems, TokenCache},
    model::{Clock, EqualShares, LeaseProvider, Randomness},
};

pub use crate::credential::ConfigError;
pub use retention::Retention;

/// Bounds that the SDK's connection pool sets for one HTTP attempt.
const REQUEST_TIMEOUT_BOUNDS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(65));

/// The longest interval between polls: some of them are multiplied, and an `Instant` overflows beyond that.
const LONGEST_INTERVAL: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The shortest end-to-end deadline that the SDK takes.
const SHORTEST_OPERATION_TIMEOUT: Duration = Duration::from_secs(1);

/// Where the store is, how to sign in to it, and how hard to work.
///
/// Only the endpoint and the credential have no default. [`from_env`](Self::from_env) reads both, and more, from the
/// environment.
///
/// ```
/// use duroxide_cosmos::{CosmosDBProviderConfig, Credential};
///
/// let config = CosmosDBProviderConfig::default()
///     .with_endpoint("https://myaccount.documents.azure.com/")
///     .with_credential(Credential::managed_identity())
///     .with_database("orders")
///     .with_region("West Europe");
/// config.validate()?;
/// # Ok::<(), duroxide_cosmos::ConfigError>(())
/// ```
///
/// `Debug` shows no key, secret or connection string.
#[derive(Clone)]
pub struct CosmosDBProviderConfig {
    endpoint: Option<String>,
    credential: Option<Credential>,
    cloud: Cloud,
    token_scope: Option<String>,
    database: String,
    container: String,
    regions: Vec<Region>,
    create_if_missing: Option<bool>,
    throughput: Throughput,
    reconciler_age_threshold: Duration,
    request_timeout: Duration,
    operation_timeout: Duration,
    wakeup_interval: Duration,
    poll_interval: Duration,
    inline_claims: bool,
    retention: Retention,
    /// None for [`EqualShares`].
    leases: Option<Arc<dyn LeaseProvider>>,
    history_cache_bytes: usize,
    read_staleness: Duration,
    user_agent_suffix: String,
    clock: Clock,
    randomness: Randomness,
}

impl Default for CosmosDBProviderConfig {
    fn default() -> Self {
        Self {
            endpoint: None,
            credential: None,
            cloud: Cloud::default(),
            token_scope: None,
            database: "duroxide".into(),
            container: "duroxide".into(),
            regions: Vec::new(),
            create_if_missing: None,
            throughput: Throughput::default(),
            reconciler_age_threshold: Duration::from_secs(2),
            request_timeout: Duration::from_secs(3),
            operation_timeout: Duration::from_secs(10),
            wakeup_interval: Duration::from_millis(250),
            poll_interval: Duration::from_secs(3),
            inline_claims: true,
            retention: Retention::default(),
            leases: None,
            history_cache_bytes: 64 * 1024 * 1024,
            read_staleness: Duration::from_millis(50),
            user_agent_suffix: "duroxide-cosmos".into(),
            clock: Clock::system(),
            randomness: Randomness::system(),
        }
    }
}

/// The throughput of a container that the provider creates. One that is already there keeps its own.
///
/// ```
/// use duroxide_cosmos::Throughput;
///
/// assert_eq!("400".parse(), Ok(Throughput::Manual(400)));
/// assert_eq!("autoscale:4000".parse(), Ok(Throughput::Autoscale(4000)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Throughput {
    /// None of its own: for serverless accounts, and databases that share theirs among containers.
    #[default]
    ServerlessOrShared,
    /// So many RU/s, always: at least 400, in steps of 100.
    Manual(u64),
    /// Up to so many RU/s, and down to a tenth of it: at least 1,000, in steps of 1,000.
    Autoscale(u64),
}

impl Throughput {
    const SETTING: &'static str = "the throughput (COSMOS_THROUGHPUT)";

    fn validate(self) -> Result<(), ConfigError> {
        let (rate, least, step) = match self {
            Self::ServerlessOrShared => return Ok(()),
            Self::Manual(rate) => (rate, 400, 100),
            Self::Autoscale(rate) => (rate, 1_000, 1_000),
        };
        if rate >= least && rate % step == 0 {
            return Ok(());
        }
        Err(ConfigError::invalid(
            Self::SETTING,
            format!("of {rate} RU/s is not possible: at least {least}, in steps of {step}"),
        ))
    }
}

impl FromStr for Throughput {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = match text.split_once(':') {
            None => text.trim().parse().map(Self::Manual).ok(),
            Some((mode, rate)) if mode.trim().eq_ignore_ascii_case("autoscale") => {
                rate.trim().parse().map(Self::Autoscale).ok()
            }
            Some(_) => None,
        };
        parsed.ok_or_else(|| ConfigError::invalid(Self::SETTING, "must be a number of RU/s, or autoscale:NUMBER"))
    }
}

/// Settings.
impl CosmosDBProviderConfig {
    /// The account's endpoint, `https://<account>.documents.azure.com/`. A connection string brings its own.
    ///
    /// Plain `http://` activities for an emulator on this machine only.
    pub fn with_endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoint = Some(endpoint.into());
        self
    }

    /// How to sign in.
    pub fn with_credential(mut self, credential: impl Into<Credential>) -> Self {
        self.credential = Some(credential.into());
        self
    }

    /// The Azure cloud whose Entra ID signs in. By default the endpoint tells.
    pub fn with_cloud(mut self, cloud: Cloud) -> Self {
        self.cloud = cloud;
        self
    }

    /// The scope to ask Entra ID tokens for, instead of `https://cosmos.azure.com/.default` in the public cloud and
    /// `https://<account host>/.default` in others.
    pub fn with_token_scope(mut self, scope: impl Into<String>) -> Self {
        self.token_scope = Some(scope.into());
        self
    }

    /// The database, `duroxide` by default.
    pub fn with_database(mut self, database: impl Into<String>) -> Self {
        self.database = database.into();
        self
    }

    /// The container, `duroxide` by default.
    pub fn with_container(mut self, container: impl Into<String>) -> Self {
        self.container = container.into();
        self
    }

    /// The Azure region that this process runs in, or the nearest one: the account's regions are tried in order of
    /// their distance from it.
    ///
    /// A region that the SDK doesn't know is tried first, and the account's order decides about the rest. Writes go to
    /// the account's write region wherever the process is.
    pub fn with_region(self, region: impl Into<String>) -> Self {
        self.with_preferred_regions([region])
    }

    /// The account's regions in the order in which to try them. None, the default, is the account's own order.
    ///
    /// Names are taken as Azure shows them or as it writes them: `West Europe` or `westeurope`.
    pub fn with_preferred_regions<R: Into<String>>(mut self, regions: impl IntoIterator<Item = R>) -> Self {
        self.regions = regions.into_iter().map(|region| Region::new(region.into())).collect();
        self
    }

    /// Whether to create the database and the container where they are missing.
    ///
    /// By default only with an account key: Entra ID identities can't create either through the data plane, whatever
    /// their role, and a provider that tries gets a 403.
    pub fn with_create_if_missing(mut self, create: bool) -> Self {
        self.create_if_missing = Some(create);
        self
    }

    /// The throughput of a container that the provider creates.
    pub fn with_throughput(mut self, throughput: Throughput) -> Self {
        self.throughput = throughput;
        self
    }

    /// How old a message must be to count as left behind, 2 s by default.
    pub fn with_reconciler_age_threshold(mut self, age: Duration) -> Self {
        self.reconciler_age_threshold = age;
        self
    }

    /// The time that one HTTP attempt may take, 3 s by default.
    ///
    /// Keep it below the runtime's lock timeouts (5 s for a turn by default): an attempt that outlives the lock can
    /// neither be repeated in time nor reported.
    pub fn with_request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// The time that a call without a deadline of its own may take, with all its attempts, 10 s by default.
    pub fn with_operation_timeout(mut self, timeout: Duration) -> Self {
        self.operation_timeout = timeout;
        self
    }

    /// How often a process that waits looks at its bell, 250 ms by default: how soon it notices what another process has put
    /// into the queues. Work of this process is noticed at once regardless.
    ///
    /// A look is one request of 1 RU, whatever the number of partitions and processes: at the default, 4 RU/s a process.
    pub fn with_wakeup_interval(mut self, interval: Duration) -> Self {
        self.wakeup_interval = interval.min(LONGEST_INTERVAL);
        self
    }

    /// How often a process that waits asks one physical partition for everything, 3 s by default, and less often where there
    /// are more processes than partitions.
    ///
    /// It finds what nobody was told of: timers and undelivered messages of a process that died, and what was lost on the way. A
    /// sweep is one request of about 3 RU.
    pub fn with_poll_interval(mut self, interval: Duration) -> Self {
        self.poll_interval = interval.min(LONGEST_INTERVAL);
        self
    }

    /// Whether what makes work carries the claim for a dispatcher of this process that waits for it, as is the default: a start, the end
    /// of an activity or a turn that schedules some is then one request with what follows from it.
    pub fn with_inline_claims(mut self, on: bool) -> Self {
        self.inline_claims = on;
        self
    }

    /// How long what has ended is kept: for ever by default.
    ///
    /// One of the processes that wait for work deletes what is older, a family at a time and only when all of it has ended. What counts is the
    /// present setting, also for what ended before it was made: give the same to every process.
    pub fn with_retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Which slots this process looks after, [`EqualShares`] by default.
    pub fn with_leases(mut self, leases: impl LeaseProvider + 'static) -> Self {
        self.leases = Some(Arc::new(leases));
        self
    }

    /// The memory that cached histories may take, 64 MiB by default; 0 keeps none.
    pub fn with_history_cache_bytes(mut self, bytes: usize) -> Self {
        self.history_cache_bytes = bytes;
        self
    }

    /// How long a read may be answered from what this process last saw of an instance, 50 ms by default; zero asks the
    /// service every time.
    ///
    /// What this process writes itself is seen at once in any case. Clients that wait for an orchestration read it every
    /// few milliseconds, and so does every activity that starts: this is what keeps that from costing a request each. Ten times as old
    /// an answer will do while the instance's next step is in this process, as a turn or an activity that waits or runs.
    pub fn with_read_staleness(mut self, staleness: Duration) -> Self {
        self.read_staleness = staleness;
        self
    }

    /// What the account's logs show behind the SDK's user agent, `duroxide-cosmos` by default. At most 25 letters,
    /// digits, `-`, `_`, `.` and `~`.
    pub fn with_user_agent_suffix(mut self, suffix: impl Into<String>) -> Self {
        self.user_agent_suffix = suffix.into();
        self
    }

    /// Where the time of day comes from, the system by default: for tests and simulations.
    ///
    /// Locks, timers and Entra ID tokens expire by it: processes that share a container must roughly agree on the time.
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// Where tokens and jitter come from, the operating system by default: for tests and simulations.
    ///
    /// With a seed, a provider sends the same requests again for the same calls and answers, on a runtime with one thread.
    ///
    /// ```
    /// use duroxide_cosmos::{Clock, CosmosDBProviderConfig, Randomness};
    ///
    /// let config = CosmosDBProviderConfig::default()
    ///     .with_clock(Clock::from_fn(|| 1_763_256_000_000))
    ///     .with_randomness(Randomness::seeded(7));
    /// ```
    pub fn with_randomness(mut self, randomness: Randomness) -> Self {
        self.randomness = randomness;
        self
    }
}

/// What is set.
impl CosmosDBProviderConfig {
    /// The account's endpoint: the one given, or the connection string's.
    pub fn endpoint(&self) -> Option<&str> {
        let brought = || self.credential.as_ref().and_then(Credential::endpoint);
        self.endpoint.as_deref().or_else(brought)
    }

    /// How to sign in.
    pub fn credential(&self) -> Option<&Credential> {
        self.credential.as_ref()
    }

    /// The Azure cloud whose Entra ID signs in.
    pub fn cloud(&self) -> &Cloud {
        &self.cloud
    }

    /// The scope to ask Entra ID tokens for, if one was given.
    pub fn token_scope(&self) -> Option<&str> {
        self.token_scope.as_deref()
    }

    /// The database.
    pub fn database(&self) -> &str {
        &self.database
    }

    /// The container.
    pub fn container(&self) -> &str {
        &self.container
    }

    /// The regions given.
    pub fn preferred_regions(&self) -> &[Region] {
        &self.regions
    }

    /// The regions as the SDK takes them: none is the account's own order, one is proximity to it, more are tried in
    /// the order given.
    pub fn routing_strategy(&self) -> RoutingStrategy {
        match self.regions.as_slice() {
            [only] if is_known_to_sdk(only) => RoutingStrategy::ProximityTo(only.clone()),
            regions => RoutingStrategy::PreferredRegions(regions.to_vec()),
        }
    }

    /// Whether to create the database and the container where they are missing: as given, or else with account keys
    /// only.
    pub fn create_if_missing(&self) -> bool {
        let by_credential = || self.credential.as_ref().is_some_and(Credential::is_key);
        self.create_if_missing.unwrap_or_else(by_credential)
    }

    /// The throughput of a container that the provider creates.
    pub fn throughput(&self) -> Throughput {
        self.throughput
    }

    /// How old an undelivered message must be to count as left behind.
    pub fn reconciler_age_threshold(&self) -> Duration {
        self.reconciler_age_threshold
    }

    /// The time that one HTTP attempt may take.
    pub fn request_timeout(&self) -> Duration {
        self.request_timeout
    }

    /// The time that a call without a deadline of its own may take.
    pub fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    /// How often a process that waits looks at its bell.
    pub fn wakeup_interval(&self) -> Duration {
        self.wakeup_interval
    }

    /// How often a process that waits asks one physical partition for everything.
    pub fn poll_interval(&self) -> Duration {
        self.poll_interval
    }

    /// See [`with_inline_claims`](Self::with_inline_claims).
    pub fn inline_claims(&self) -> bool {
        self.inline_claims
    }

    /// How long what has ended is kept.
    pub fn retention(&self) -> &Retention {
        &self.retention
    }

    /// Which slots this process looks after.
    pub fn leases(&self) -> &dyn LeaseProvider {
        self.leases.as_deref().unwrap_or(&EqualShares)
    }

    /// The application's own [`LeaseProvider`], if it has one.
    pub(crate) fn own_leases(&self) -> Option<&Arc<dyn LeaseProvider>> {
        self.leases.as_ref()
    }

    /// The memory that cached histories may take.
    pub fn history_cache_bytes(&self) -> usize {
        self.history_cache_bytes
    }

    /// How long a read may be answered from memory.
    pub fn read_staleness(&self) -> Duration {
        self.read_staleness
    }

    /// What follows the SDK's user agent.
    pub fn user_agent_suffix(&self) -> &str {
        &self.user_agent_suffix
    }

    /// Where the time of day comes from.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Where tokens and jitter come from.
    pub fn randomness(&self) -> &Randomness {
        &self.randomness
    }

    /// The kind of credential, for error messages.
    pub(crate) fn credential_kind(&self) -> String {
        let kind = self.credential.as_ref().map(Credential::kind);
        kind.map_or_else(|| "none".into(), |kind| kind.into_owned())
    }
}

impl CosmosDBProviderConfig {
    /// Reads the configuration from the process's environment. A variable that is empty counts as not set.
    ///
    /// | Variable | Meaning |
    /// |---|---|
    /// | `COSMOS_ENDPOINT` | the account's endpoint |
    /// | `COSMOS_KEY` | an account key |
    /// | `COSMOS_CONNECTION_STRING` | endpoint and key in one |
    /// | `COSMOS_CREDENTIAL` | `key`, `connection_string`, `managed_identity`, `workload_identity`, `client_secret` or `developer_tools` |
    /// | `COSMOS_DATABASE`, `COSMOS_CONTAINER` | both `duroxide` by default |
    /// | `COSMOS_REGION` | a region, or several separated by commas |
    /// | `COSMOS_CREATE_IF_MISSING` | `true` or `false` |
    /// | `COSMOS_THROUGHPUT` | RU/s of a container that is created: `400` or `autoscale:4000` |
    /// | `AZURE_TENANT_ID`, `AZURE_CLIENT_ID`, `AZURE_CLIENT_SECRET`, `AZURE_FEDERATED_TOKEN_FILE`, `AZURE_AUTHORITY_HOST` | the Entra ID identity, as all Azure SDKs read them |
    /// | `AZURE_COSMOS_AAD_SCOPE_OVERRIDE` | the scope to ask tokens for, as other Cosmos DB SDKs read it |
    ///
    /// Without `COSMOS_CREDENTIAL`, a key or a connection string is used where there is one, and otherwise the Entra ID
    /// credential that the environment points to, the first of: workload identity (`AZURE_FEDERATED_TOKEN_FILE` is
    /// set), client secret (`AZURE_CLIENT_SECRET`), managed identity (`IDENTITY_ENDPOINT` or `MSI_ENDPOINT`, which App
    /// Service and Container Apps set), the developer tools. A virtual machine sets nothing: say
    /// `COSMOS_CREDENTIAL=managed_identity` there. `AZURE_CLIENT_ID` makes a managed identity the user-assigned one
    /// with that client id. Which was chosen, and why, is logged at info level.
    ///
    /// # Errors
    /// All missing, contradictory and unusable variables in one error.
    ///
    /// ```no_run
    /// use duroxide_cosmos::CosmosDBProviderConfig;
    ///
    /// let config = CosmosDBProviderConfig::from_env()?.with_wakeup_interval(std::time::Duration::from_millis(500));
    /// # Ok::<(), duroxide_cosmos::ConfigError>(())
    /// ```
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// As [`from_env`](Self::from_env), from any set of variables.
    pub(crate) fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        env::read(lookup)
    }

    /// Checks what can be checked without asking the account.
    ///
    /// # Errors
    /// All that is wrong, in one error.
    ///
    /// ```
    /// use duroxide_cosmos::{CosmosDBProviderConfig, Credential};
    ///
    /// let error = CosmosDBProviderConfig::default()
    ///     .with_endpoint("http://myaccount.documents.azure.com/")
    ///     .with_credential(Credential::developer_tools())
    ///     .validate()
    ///     .unwrap_err();
    /// assert!(error.to_string().contains("must use https"));
    /// ```
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut problems = Problems::default();
        self.validate_account(&mut problems);
        self.validate_store(&mut problems);
        problems.into_result()
    }

    /// Checks everything but endpoint and credential, for a client that has its own.
    pub(crate) fn validate_for_client(&self) -> Result<(), ConfigError> {
        let mut problems = Problems::default();
        self.validate_store(&mut problems);
        problems.into_result()
    }

    fn validate_store(&self, problems: &mut Problems) {
        problems.keep(validate_name("the database (COSMOS_DATABASE)", &self.database));
        problems.keep(validate_name("the container (COSMOS_CONTAINER)", &self.container));
        problems.keep(self.throughput.validate());
        let no_empty_region = self.regions.iter().all(|region| !region.as_str().is_empty());
        problems.require(no_empty_region, "the regions (COSMOS_REGION)", "must not be empty");
        self.validate_work(problems);
        self.validate_times(problems);
        problems.require(
            UserAgentSuffix::try_new(self.user_agent_suffix.as_str()).is_some(),
            "user_agent_suffix",
            "must be at most 25 letters, digits, - _ . or ~",
        );
    }

    fn validate_account(&self, problems: &mut Problems) {
        problems.keep(self.require_endpoint().and_then(endpoint::parse));
        problems.keep(self.require_credential().and_then(Credential::validate));
        problems.keep(self.validate_endpoints_agree());
        problems.keep(self.cloud.validate());
        let scope_given = self.token_scope.as_deref().is_none_or(|scope| !scope.trim().is_empty());
        problems.require(scope_given, "the token scope (AZURE_COSMOS_AAD_SCOPE_OVERRIDE)", "must not be empty");
    }

    fn validate_endpoints_agree(&self) -> Result<(), ConfigError> {
        let brought = self.credential.as_ref().and_then(Credential::endpoint);
        let (Some(given), Some(brought)) = (&self.endpoint, brought) else {
            return Ok(());
        };
        // An endpoint that can't be parsed is a problem of its own.
        let differ = |given| endpoint::parse(brought).is_ok_and(|brought| brought != given);
        if endpoint::parse(given).is_ok_and(differ) {
            return Err(ConfigError::contradiction(
                vec!["COSMOS_ENDPOINT", "COSMOS_CONNECTION_STRING"],
                "they name different accounts; a connection string needs no endpoint beside it",
            ));
        }
        Ok(())
    }

    fn validate_work(&self, problems: &mut Problems) {
        problems.require(!self.wakeup_interval.is_zero(), "wakeup_interval", "must be longer than zero");
        problems.require(!self.poll_interval.is_zero(), "poll_interval", "must be longer than zero");
    }

    fn validate_times(&self, problems: &mut Problems) {
        let (shortest, longest) = REQUEST_TIMEOUT_BOUNDS;
        problems.require(
            (shortest..=longest).contains(&self.request_timeout),
            "request_timeout",
            "must be between 100 ms and 65 s",
        );
        problems.require(
            self.operation_timeout >= SHORTEST_OPERATION_TIMEOUT,
            "operation_timeout",
            "must be at least 1 s",
        );
        problems.require(
            self.request_timeout <= self.operation_timeout,
            "request_timeout",
            "must not be longer than operation_timeout",
        );
    }

    fn require_endpoint(&self) -> Result<&str, ConfigError> {
        self.endpoint().ok_or_else(|| {
            ConfigError::missing(vec!["the endpoint"], "call with_endpoint(\"https://<account>.documents.azure.com/\")")
        })
    }

    fn require_credential(&self) -> Result<&Credential, ConfigError> {
        self.credential.as_ref().ok_or_else(|| {
            ConfigError::missing(
                vec!["the credential"],
                "call with_credential(…), for example with Credential::managed_identity()",
            )
        })
    }

    /// The SDK's account reference for this endpoint and credential, and the tokens that it keeps.
    pub(crate) fn account_reference(&self) -> Result<(AccountReference, Option<TokenCache>), ConfigError> {
        let (endpoint, credential) = (self.require_endpoint()?, self.require_credential()?);
        let sources = (&self.clock, &self.randomness);
        account_reference(endpoint, credential, &self.cloud, self.token_scope(), sources)
    }
}

impl fmt::Debug for CosmosDBProviderConfig {
    // Not derived: an endpoint may hold a connection string that was put in the wrong place.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CosmosDBProviderConfig")
            .field("endpoint", &self.endpoint().map(endpoint::shown))
            .field("credential", &self.credential)
            .field("cloud", &self.cloud)
            .field("token_scope", &self.token_scope)
            .field("database", &self.database)
            .field("container", &self.container)
            .field("regions", &self.regions)
            .field("create_if_missing", &self.create_if_missing())
            .field("throughput", &self.throughput)
            .field("reconciler_age_threshold", &self.reconciler_age_threshold)
            .field("request_timeout", &self.request_timeout)
            .field("operation_timeout", &self.operation_timeout)
            .field("wakeup_interval", &self.wakeup_interval)
            .field("poll_interval", &self.poll_interval)
            .field("inline_claims", &self.inline_claims)
            .field("retention", &self.retention)
            .field("leases", &self.leases())
            .field("history_cache_bytes", &self.history_cache_bytes)
            .field("read_staleness", &self.read_staleness)
            .field("user_agent_suffix", &self.user_agent_suffix)
            .field("clock", &self.clock)
            .field("randomness", &self.randomness)
            .finish()
    }
}

/// Proximity to a region that the SDK doesn't know would be no preference at all. It has a display name for each one
/// that it knows, and repeats the normalised name for the others.
fn is_known_to_sdk(region: &Region) -> bool {
    region.display_name() != region.as_str()
}

/// The service's rules for the names of databases and containers.
fn validate_name(setting: &'static str, name: &str) -> Result<(), ConfigError> {
    let problem = if name.trim().is_empty() {
        "must not be empty"
    } else if name.chars().count() > 255 {
        "must have at most 255 characters"
    } else if name.contains(['/', '\\', '?', '#']) {
        "must not contain / \\ ? or #"
    } else if name.ends_with(' ') {
        "must not end with a space"
    } else {
        return Ok(());
    };
    Err(ConfigError::invalid(setting, problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: &str = "https://acc.documents.azure.com/";

    fn config() -> CosmosDBProviderConfig {
        CosmosDBProviderConfig::default().with_endpoint(ENDPOINT).with_credential(Credential::managed_identity())
    }

    fn problem(config: CosmosDBProviderConfig) -> String {
        config.validate().unwrap_err().to_string()
    }

    #[test]
    fn the_defaults_are_the_documented_ones_and_lack_only_endpoint_and_credential() {
        let config = CosmosDBProviderConfig::default();
        assert_eq!((config.database(), config.container()), ("duroxide", "duroxide"));
        assert_eq!(config.reconciler_age_threshold(), Duration::from_secs(2));
        assert_eq!(config.request_timeout(), Duration::from_secs(3));
        assert_eq!(config.operation_timeout(), Duration::from_secs(10));
        assert_eq!(config.wakeup_interval(), Duration::from_millis(250));
        assert_eq!(config.poll_interval(), Duration::from_secs(3));
        assert!(config.inline_claims());
        assert_eq!(config.retention(), &Retention::default());
        assert_eq!(config.read_staleness(), Duration::from_millis(50));
        assert_eq!(config.history_cache_bytes(), 64 << 20);
        assert_eq!(config.throughput(), Throughput::ServerlessOrShared);
        assert_eq!(config.routing_strategy(), RoutingStrategy::PreferredRegions(vec![]));

        let ConfigError::Several(problems) = config.validate().unwrap_err() else {
            panic!("expected two problems");
        };
        assert!(matches!(problems.as_slice(), [ConfigError::Missing { .. }, ConfigError::Missing { .. }]));
        assert!(config.account_reference().is_err());
        assert_eq!(config.credential_kind(), "none");
    }

    #[test]
    fn what_is_set_is_what_is_read() {
        let second = Duration::from_secs(1);
        let config = config()
            .with_cloud(Cloud::China)
            .with_token_scope("https://x/.default")
            .with_database("db")
            .with_container("box")
            .with_create_if_missing(true)
            .with_throughput(Throughput::Manual(400))
            .with_reconciler_age_threshold(second * 2)
            .with_request_timeout(second * 3)
            .with_operation_timeout(second * 4)
            .with_wakeup_interval(second * 5)
            .with_poll_interval(second * 6)
            .with_inline_claims(false)
            .with_retention(Retention::default().with_failed(second))
            .with_history_cache_bytes(0)
            .with_user_agent_suffix("orders")
            .with_clock(Clock::from_fn(|| 7))
            .with_randomness(Randomness::seeded(7));
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.endpoint(), Some(ENDPOINT));
        assert!(config.credential().is_some());
        assert_eq!(config.cloud(), &Cloud::China);
        assert_eq!(config.token_scope(), Some("https://x/.default"));
        assert_eq!((config.database(), config.container()), ("db", "box"));
        assert!(config.create_if_missing());
        assert_eq!(config.throughput(), Throughput::Manual(400));
        assert_eq!(config.reconciler_age_threshold(), second * 2);
        assert_eq!(config.request_timeout(), second * 3);
        assert_eq!(config.operation_timeout(), second * 4);
        assert_eq!(config.wakeup_interval(), second * 5);
        assert_eq!(config.poll_interval(), second * 6);
        assert!(!config.inline_claims());
        assert_eq!(config.retention().failed(), Some(second));
        assert_eq!(config.history_cache_bytes(), 0);
        assert_eq!(config.user_agent_suffix(), "orders");
        assert_eq!(config.clock().now(), 7);
        assert_eq!(config.randomness().token(), Randomness::seeded(7).token());
        assert!(config.account_reference().is_ok());
    }

    #[test]
    fn one_region_is_proximity_and_several_are_an_order() {
        let near = config().with_region("West Europe");
        assert_eq!(near.routing_strategy(), RoutingStrategy::ProximityTo(Region::WEST_EUROPE));
        let order = config().with_preferred_regions(["northeurope", "West Europe"]);
        assert_eq!(
            order.routing_strategy(),
            RoutingStrategy::PreferredRegions(vec![Region::NORTH_EUROPE, Region::WEST_EUROPE])
        );
        assert_eq!(order.preferred_regions().len(), 2);
        let unknown = config().with_region("Atlantis North");
        assert_eq!(unknown.routing_strategy(), RoutingStrategy::PreferredRegions(vec![Region::new("atlantisnorth")]));
        assert!(problem(config().with_region(" ")).contains("COSMOS_REGION"));
    }

    #[test]
    fn only_keys_create_by_default() {
        assert!(!config().create_if_missing());
        assert!(config().with_create_if_missing(true).create_if_missing());
        #[cfg(feature = "key_auth")]
        {
            let keyed = config().with_credential(Credential::account_key("a2V5"));
            assert!(keyed.create_if_missing());
            assert!(!keyed.with_create_if_missing(false).create_if_missing());
        }
    }

    #[test]
    fn each_unusable_setting_is_named() {
        let second = Duration::from_secs(1);
        for (config, named) in [
            (config().with_endpoint("acc"), "COSMOS_ENDPOINT"),
            (config().with_database(""), "COSMOS_DATABASE"),
            (config().with_database("a/b"), "must not contain"),
            (config().with_container("  "), "COSMOS_CONTAINER"),
            (config().with_container("a "), "end with a space"),
            (config().with_container("x".repeat(256)), "255"),
            (config().with_wakeup_interval(Duration::ZERO), "wakeup_interval"),
            (config().with_poll_interval(Duration::ZERO), "poll_interval"),
            (config().with_request_timeout(Duration::ZERO), "100 ms"),
            (config().with_request_timeout(second * 11), "operation_timeout"),
            (config().with_request_timeout(second / 2).with_operation_timeout(second * 9 / 10), "at least 1 s"),
            (config().with_user_agent_suffix("a b"), "user_agent_suffix"),
            (config().with_user_agent_suffix("x".repeat(26)), "at most 25"),
            (config().with_token_scope(""), "AZURE_COSMOS_AAD_SCOPE_OVERRIDE"),
            (config().with_throughput(Throughput::Manual(399)), "COSMOS_THROUGHPUT"),
            (config().with_credential(Credential::client_secret("", "", "")), "AZURE_CLIENT_SECRET"),
            (config().with_cloud(Cloud::Custom { authority_host: "x".into() }), "AZURE_AUTHORITY_HOST"),
        ] {
            let shown = format!("{config:?}");
            let problem = problem(config);
            assert!(problem.contains(named), "{problem} for {shown}");
            assert!(!problem.contains("problems"), "one mistake, one problem: {problem}");
        }
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let problem = problem(config().with_database("").with_wakeup_interval(Duration::ZERO));
        assert!(problem.contains("COSMOS_DATABASE") && problem.contains("wakeup_interval"));
    }

    #[test]
    fn throughput_follows_the_service_s_steps() {
        assert_eq!(Throughput::Manual(400).validate(), Ok(()));
        assert_eq!(Throughput::Autoscale(1_000).validate(), Ok(()));
        for bad in
            [Throughput::Manual(450), Throughput::Manual(300), Throughput::Autoscale(0), Throughput::Autoscale(1_500)]
        {
            assert!(bad.validate().is_err(), "{bad:?}");
        }
        assert_eq!(" Autoscale : 4000 ".parse(), Ok(Throughput::Autoscale(4_000)));
        for bad in ["", "many", "-1", "autoscale", "autoscale:", "manual:400", "400:autoscale"] {
            assert!(bad.parse::<Throughput>().is_err(), "{bad}");
        }
    }

    #[cfg(feature = "key_auth")]
    #[test]
    fn a_connection_string_brings_its_endpoint_and_another_one_contradicts_it() {
        let text = "AccountEndpoint=https://acc.documents.azure.com:443/;AccountKey=c2VjcmV0;";
        let credential = Credential::connection_string(text).unwrap();
        let config = CosmosDBProviderConfig::default().with_credential(credential);
        assert_eq!(config.endpoint(), Some(ENDPOINT));
        assert_eq!(config.validate(), Ok(()));
        assert!(config.account_reference().is_ok());
        assert_eq!(config.clone().with_endpoint(ENDPOINT).validate(), Ok(()));

        let other = config.with_endpoint("https://other.documents.azure.com/");
        assert!(matches!(other.validate(), Err(ConfigError::Contradiction { .. })));
        assert!(!problem(other).contains("c2VjcmV0"));
    }

    #[test]
    fn debug_tells_a_simulated_provider_from_a_real_one() {
        let real = format!("{:?}", config());
        assert!(real.contains("Clock(system)") && real.contains("Randomness(system)"), "{real}");
        let simulated = config().with_clock(Clock::from_fn(|| 0)).with_randomness(Randomness::seeded(0));
        let simulated = format!("{simulated:?}");
        assert!(simulated.contains("Clock(given)") && simulated.contains("Randomness(seeded)"), "{simulated}");
    }

    #[test]
    fn debug_shows_no_secret() {
        let mut configs = vec![
            config().with_credential(Credential::client_secret("t", "c", "c2VjcmV0")),
            config().with_endpoint("https://acc.documents.azure.com/;AccountKey=c2VjcmV0"),
            config().with_endpoint("https://x:c2VjcmV0@acc.documents.azure.com/"),
        ];
        #[cfg(feature = "key_auth")]
        configs.push(config().with_credential(Credential::account_key("c2VjcmV0")));
        configs.push(config());
        for config in configs {
            let shown = format!("{config:?} {config:#?}");
            assert!(!shown.contains("c2VjcmV0"), "{shown}");
        }
    }
}
