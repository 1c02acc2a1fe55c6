//! How a local account is set up.

use std::sync::Arc;
use std::time::Duration;

use azure_core::credentials::Secret;
use azure_core::http::Url;
use azure_data_cosmos_driver::in_memory_emulator::{
    ConsistencyLevel, InMemoryEmulatorHttpClient, ReplicationConfig, VirtualAccountConfig, VirtualRegion, WriteMode,
};

use crate::account::LocalAccount;
use crate::provision::Provisioning;
use crate::queries::Queries;
use crate::service::Service;
use crate::wire::Wire;

/// The account key that every Cosmos DB emulator has. It is public and protects nothing.
pub const EMULATOR_KEY: &str =
    "C2y6yDjf5/R+ob0N8A7Cgv30VRDJIWEHLM+4QDU5DE2nQ9nDuVTqobD4b8mGGyPMbIZnqyMsEcaGQy67XIw/Jw==";

/// Sets up a [`LocalAccount`].
#[derive(Clone, Debug)]
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
    /// How many physical partitions every container is created with; one by default.
    ///
    /// A container with unique keys gets four, whatever is set here.
    ///
    /// # Panics
    ///
    /// If `count` is zero or over 100,000.
    pub fn with_partitions(mut self, count: u32) -> Self {
        assert!((1..=100_000).contains(&count), "a container has from 1 to 100,000 physical partitions, not {count}");
        self.partitions = count;
        self
    }

    /// How long every request takes on its way to the store; no time by default.
    pub fn with_latency(mut self, latency: Duration) -> Self {
        self.latency = latency;
        self
    }

    /// Whether containers refuse what exceeds their throughput. The emulator throttles point operations only, by charges
    /// of its own: for batches and queries use a [`WireRule`](crate::WireRule).
    pub fn with_throttling(mut self, throttling: bool) -> Self {
        self.throttling = throttling;
        self
    }

    /// The throughput, at least 400 RU/s, of containers that are created without one of their own.
    ///
    /// # Panics
    ///
    /// If it is below 400.
    pub fn with_throughput(mut self, request_units: u64) -> Self {
        assert!(request_units >= 400, "a container has at least 400 RU/s");
        self.throughput = Some(request_units);
        self
    }

    /// How writes come from one region to the others; at once by default.
    pub fn with_replication(mut self, replication: ReplicationConfig) -> Self {
        self.replication = replication;
        self
    }

    /// The account's consistency; session by default.
    pub fn with_consistency(mut self, consistency: ConsistencyLevel) -> Self {
        self.consistency = consistency;
        self
    }

    /// Whether one region takes writes, the default, or all do.
    pub fn with_write_mode(mut self, mode: WriteMode) -> Self {
        self.write_mode = mode;
        self
    }

    /// The account's regions, the write region first.
    ///
    /// # Panics
    ///
    /// If there are none.
    pub fn with_regions(mut self, regions: &[&str]) -> Self {
        assert!(!regions.is_empty(), "an account has at least one region");
        self.regions = regions.iter().map(|name| (*name).to_owned()).collect();
        self
    }

    /// Whether a filter by a path that is not indexed is served by a scan; refused by default.
    ///
    /// The service once refused such filters unless the request allowed a scan. Today it scans and charges for every
    /// document that it reads. The refusal makes a test fail that would be expensive on Azure.
    pub fn with_unindexed_filters(mut self, scans: bool) -> Self {
        self.scans = scans;
        self
    }

    /// The account key, in base64; [`EMULATOR_KEY`] by default.
    pub fn with_account_key(mut self, key: impl Into<String>) -> Self {
        self.key = Secret::new(key.into());
        self
    }

    /// Builds the account, empty.
    ///
    /// # Panics
    ///
    /// If two regions have the same name.
    pub fn build(self) -> LocalAccount {
        let endpoint = gateway(&self.regions[0]);
        let provisioning = Provisioning { partitions: self.partitions, throughput: self.throughput };
        let key = self.key.clone();
        let (latency, queries) = (self.latency, Queries::new(self.scans));
        let emulator = InMemoryEmulatorHttpClient::new(self.config());
        let service = Service::new(Arc::new(emulator));
        let wire = Arc::new(Wire::new(service, provisioning, queries, latency));
        LocalAccount::from_parts(wire, endpoint, key)
    }

    fn config(self) -> VirtualAccountConfig {
        let region = |name: &String| VirtualRegion::new(name, gateway(name));
        let regions = self.regions.iter().map(region).collect();
        VirtualAccountConfig::new(regions)
            .expect("there is a region, and ids are given by position")
            .with_account_id("local")
            .with_write_mode(self.write_mode)
            .with_consistency(self.consistency)
            .with_replication_config(self.replication)
            .with_throttling_enabled(self.throttling)
    }
}

/// The address of a region. Nothing listens there: the name only tells the emulator which region is meant.
fn gateway(region: &str) -> Url {
    let letters = region.chars().filter(char::is_ascii_alphanumeric);
    let host: String = letters.map(|c| c.to_ascii_lowercase()).collect();
    Url::parse(&format!("https://local-{host}.emulator.local/")).expect("ASCII letters and digits make a host name")
}
