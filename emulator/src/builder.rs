//! The builder of a local account.

use std::sync::Arc;
use std::time::Duration;

use azure_core::credentials::Secret;
use azure_core::http::Url;
use azure_data_cosmos_driver::in_memory_emulator::{
    ConsistencyLevel, InMemoryEmulatorHttpClient, ReplicationConfig, VirtualAccountConfig, VirtualRegion, WriteMode,
};

use crate::account::LocalAccount;
use crate::provisioning::Provisioning;
use crate::query_check::QueryChecker;
use crate::service::Service;
use crate::wire::Wire;

/// The well-known account key of every Cosmos DB emulator. It is public and protects nothing.
pub const EMULATOR_KEY: &str =
    "C2y6yDjf5/R+ob0N8A7Cgv30VRDJIWEHLM+4QDU5DE2nQ9nDuVTqobD4b8mGGyPMbIZnqyMsEcaGQy67XIw/Jw==";

/// Builds a [`LocalAccount`].
#[derive(Clone, Debug)]
#[must_use = "call `build` to create the account"]
pub struct LocalAccountBuilder {
    partitions: u32,
    throughput: Option<u64>,
    throttling: bool,
    latency: Duration,
    regions: Vec<String>,
    replication: ReplicationConfig,
    consistency: ConsistencyLevel,
    write_mode: WriteMode,
    scans: bool,
    key: Secret,
}

impl Default for LocalAccountBuilder {
    fn default() -> Self {
        Self {
            partitions: 1,
            throughput: None,
            throttling: false,
            latency: Duration::ZERO,
            regions: vec!["East US".to_owned()],
            replication: ReplicationConfig::immediate(),
            consistency: ConsistencyLevel::Session,
            write_mode: WriteMode::Single,
            scans: false,
            key: Secret::new(EMULATOR_KEY),
        }
    }
}

impl LocalAccountBuilder {
    /// Sets the number of physical partitions of every new container. The default is one.
    ///
    /// A container with unique keys always has four.
    ///
    /// # Panics
    ///
    /// If `count` is zero or over 100,000.
    pub fn with_partitions(mut self, count: u32) -> Self {
        assert!((1..=100_000).contains(&count), "a container has from 1 to 100,000 physical partitions, not {count}");
        self.partitions = count;
        self
    }

    /// Sets the time that every request takes on its way to the store. The default is zero.
    pub fn with_latency(mut self, latency: Duration) -> Self {
        self.latency = latency;
        self
    }

    /// Sets whether containers refuse requests that exceed their throughput. The emulator throttles only point
    /// operations, by charges of its own. For batches and queries use a [`WireRule`](crate::WireRule).
    pub fn with_throttling(mut self, throttling: bool) -> Self {
        self.throttling = throttling;
        self
    }

    /// Sets the throughput, at least 400 RU/s, of containers that are created without one.
    ///
    /// # Panics
    ///
    /// If `request_units` is below 400.
    pub fn with_throughput(mut self, request_units: u64) -> Self {
        assert!(request_units >= 400, "a container has at least 400 RU/s");
        self.throughput = Some(request_units);
        self
    }

    /// Sets how writes reach the other regions. By default they replicate at once.
    pub fn with_replication(mut self, replication: ReplicationConfig) -> Self {
        self.replication = replication;
        self
    }

    /// Sets the account's default consistency level. The default is session.
    pub fn with_consistency(mut self, consistency: ConsistencyLevel) -> Self {
        self.consistency = consistency;
        self
    }

    /// Sets whether one region accepts writes, which is the default, or all regions do.
    pub fn with_write_mode(mut self, mode: WriteMode) -> Self {
        self.write_mode = mode;
        self
    }

    /// Sets the account's regions, the write region first.
    ///
    /// # Panics
    ///
    /// If `regions` is empty.
    pub fn with_regions(mut self, regions: &[&str]) -> Self {
        assert!(!regions.is_empty(), "an account has at least one region");
        self.regions = regions.iter().map(|name| (*name).to_owned()).collect();
        self
    }

    /// Sets whether the account scans for a filter on a path that is not indexed. By default it refuses such a filter.
    ///
    /// The service once refused such filters unless the request allowed a scan. Today it scans and charges for every
    /// document that it reads. The refusal makes a test fail whose query would be expensive on Azure.
    pub fn with_unindexed_filters(mut self, scans: bool) -> Self {
        self.scans = scans;
        self
    }

    /// Sets the account key, in base64. The default is [`EMULATOR_KEY`].
    pub fn with_account_key(mut self, key: impl Into<String>) -> Self {
        self.key = Secret::new(key.into());
        self
    }

    /// Builds an empty account.
    ///
    /// # Panics
    ///
    /// If two regions have the same name.
    pub fn build(self) -> LocalAccount {
        let endpoint = gateway(&self.regions[0]);
        let provisioning = Provisioning { partitions: self.partitions, throughput: self.throughput };
        let key = self.key.clone();
        let (latency, queries) = (self.latency, QueryChecker::new(self.scans));
        let emulator = InMemoryEmulatorHttpClient::new(self.config());
        let service = Service::new(Arc::new(emulator));
        let wire = Arc::new(Wire::new(service, provisioning, queries, latency));
        LocalAccount::from_parts(wire, endpoint, key)
    }

    fn config(self) -> VirtualAccountConfig {
        let region = |name: &String| VirtualRegion::new(name, gateway(name));
        let regions = self.regions.iter().map(region).collect();
        VirtualAccountConfig::new(regions)
            .expect("the list of regions is not empty, and each id is a position in it")
            .with_account_id("local")
            .with_write_mode(self.write_mode)
            .with_consistency(self.consistency)
            .with_replication_config(self.replication)
            .with_throttling_enabled(self.throttling)
    }
}

/// Returns the address of a region. No server listens there: the emulator recognises the region by this name.
fn gateway(region: &str) -> Url {
    let letters = region.chars().filter(char::is_ascii_alphanumeric);
    let host: String = letters.map(|c| c.to_ascii_lowercase()).collect();
    Url::parse(&format!("https://local-{host}.emulator.local/")).expect("ASCII letters and digits make a host name")
}
