//! `Debug` output without secrets.

use super::CosmosDBProviderConfig;
use crate::credential::endpoint;
use std::fmt;

impl fmt::Debug for CosmosDBProviderConfig {
    // Not derived, because a user may have set a connection string as the endpoint.
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
