//! Checks of a configuration, without requests to the account.

use super::{ConfigError, CosmosDBProviderConfig, Credential};
use crate::credential::{endpoint, Problems};
use azure_data_cosmos::options::UserAgentSuffix;
use std::time::Duration;

/// The limits of the SDK's connection pool for one HTTP attempt.
const REQUEST_TIMEOUT_LIMITS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(65));
/// The shortest end-to-end deadline that the SDK takes.
const SHORTEST_OPERATION_TIMEOUT: Duration = Duration::from_secs(1);

impl CosmosDBProviderConfig {
    /// Checks the configuration without a request to the account.
    ///
    /// # Errors
    /// One error that lists all problems.
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

    /// Checks everything except endpoint and credential, for a client of the caller, which has its own.
    pub(crate) fn validate_for_client(&self) -> Result<(), ConfigError> {
        let mut problems = Problems::default();
        self.validate_store(&mut problems);
        problems.into_result()
    }

    fn validate_store(&self, problems: &mut Problems) {
        problems.collect(validate_name("the database (COSMOS_DATABASE)", &self.database));
        problems.collect(validate_name("the container (COSMOS_CONTAINER)", &self.container));
        problems.collect(self.throughput.validate());
        let no_empty_region = self.regions.iter().all(|region| !region.as_str().is_empty());
        problems.require(no_empty_region, "the regions (COSMOS_REGION)", "must not be empty");
        self.validate_intervals(problems);
        self.validate_timeouts(problems);
        problems.require(
            UserAgentSuffix::try_new(self.user_agent_suffix.as_str()).is_some(),
            "user_agent_suffix",
            "must be at most 25 letters, digits, - _ . or ~",
        );
    }

    fn validate_account(&self, problems: &mut Problems) {
        problems.collect(self.require_endpoint().and_then(endpoint::parse));
        problems.collect(self.require_credential().and_then(Credential::validate));
        problems.collect(self.validate_endpoints_agree());
        problems.collect(self.cloud.validate());
        let scope_given = self.token_scope.as_deref().is_none_or(|scope| !scope.trim().is_empty());
        problems.require(scope_given, "the token scope (AZURE_COSMOS_AAD_SCOPE_OVERRIDE)", "must not be empty");
    }

    fn validate_endpoints_agree(&self) -> Result<(), ConfigError> {
        let of_credential = self.credential.as_ref().and_then(Credential::endpoint);
        let (Some(given), Some(of_credential)) = (&self.endpoint, of_credential) else {
            return Ok(());
        };
        // Another check reports an endpoint that can't be parsed.
        let differ = |given| endpoint::parse(of_credential).is_ok_and(|other| other != given);
        if endpoint::parse(given).is_ok_and(differ) {
            return Err(ConfigError::contradiction(
                vec!["COSMOS_ENDPOINT", "COSMOS_CONNECTION_STRING"],
                "they name different accounts: unset COSMOS_ENDPOINT, because a connection string has its own",
            ));
        }
        Ok(())
    }

    fn validate_intervals(&self, problems: &mut Problems) {
        problems.require(!self.wakeup_interval.is_zero(), "wakeup_interval", "must be longer than zero");
        problems.require(!self.poll_interval.is_zero(), "poll_interval", "must be longer than zero");
    }

    fn validate_timeouts(&self, problems: &mut Problems) {
        let (shortest, longest) = REQUEST_TIMEOUT_LIMITS;
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

    pub(super) fn require_endpoint(&self) -> Result<&str, ConfigError> {
        self.endpoint().ok_or_else(|| {
            ConfigError::missing(vec!["the endpoint"], "call with_endpoint(\"https://<account>.documents.azure.com/\")")
        })
    }

    pub(super) fn require_credential(&self) -> Result<&Credential, ConfigError> {
        self.credential.as_ref().ok_or_else(|| {
            ConfigError::missing(
                vec!["the credential"],
                "call with_credential(…), for example with Credential::managed_identity()",
            )
        })
    }
}

/// Checks the service's rules for the names of databases and containers.
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
