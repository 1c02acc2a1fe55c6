//! Direct access to the SDK's emulator. Requests through this module are not counted, and rules do not match them.

use std::sync::Arc;

use azure_core::http::{headers::Headers, Method, Url};
use azure_core::Bytes;
use azure_data_cosmos_driver::in_memory_emulator::{EmulatorStore, InMemoryEmulatorHttpClient};
use serde_json::Value;

use crate::answer::{Answer, NoAnswer};
use crate::names::{ContainerName, ItemKey};
use crate::request::{read_json, Outgoing, PARTITION_KEY};

/// The SDK's emulator and its store.
pub(crate) struct Service {
    emulator: Arc<InMemoryEmulatorHttpClient>,
    store: Arc<EmulatorStore>,
}

/// A physical partition: its id and its range of effective partition keys.
#[derive(Clone, Debug)]
pub(crate) struct PartitionRange {
    pub id: String,
    pub min: String,
    pub max: String,
}

impl Service {
    pub fn new(emulator: Arc<InMemoryEmulatorHttpClient>) -> Self {
        let store = emulator.store();
        Self { emulator, store }
    }

    pub fn store(&self) -> &Arc<EmulatorStore> {
        &self.store
    }

    /// Forwards a request to the emulator unchanged.
    pub async fn forward(&self, request: &Outgoing) -> Result<Answer, NoAnswer> {
        let response = self.emulator.execute_request(&request.to_core()).await;
        Answer::read(response.map_err(|error| NoAnswer::Unroutable(Box::new(error)))?).await
    }

    /// Creates a request to the write region, without headers and body.
    pub fn request(&self, method: Method, path: &str) -> Option<Outgoing> {
        let mut url = self.write_region()?;
        url.set_path(path);
        Some(Outgoing { client: None, method, url, headers: Headers::new(), body: Bytes::new() })
    }

    /// Reads a resource in the write region, or returns `None` if it does not exist.
    pub async fn read(&self, path: &str) -> Option<Value> {
        let answer = self.forward(&self.request(Method::Get, path)?).await.ok()?;
        answer.is_success().then(|| serde_json::from_slice(&answer.body).ok()).flatten()
    }

    /// Reads an item in the write region, or returns `None` if it does not exist.
    pub async fn read_item(&self, key: &ItemKey) -> Option<Value> {
        let answer = self.forward(&self.item_request(Method::Get, key)?).await.ok()?;
        answer.is_success().then(|| read_json(&answer.body)).flatten()
    }

    /// Creates a request about an item to the write region.
    pub fn item_request(&self, method: Method, key: &ItemKey) -> Option<Outgoing> {
        let mut request = self.request(method, &key.path())?;
        request.headers.insert(PARTITION_KEY, key.partition_key.clone());
        Some(request)
    }

    /// Reads the container's physical partitions. The list is empty if the container does not exist.
    pub async fn ranges(&self, container: &ContainerName) -> Vec<PartitionRange> {
        let ranges = self.read(&format!("{}/pkranges", container.path())).await;
        let text = |range: &Value, name: &str| Some(range.get(name)?.as_str()?.to_owned());
        let read = |range: &Value| {
            let (min, max) = (text(range, "minInclusive")?, text(range, "maxExclusive")?);
            Some(PartitionRange { id: text(range, "id")?, min, max })
        };
        let list = ranges.as_ref().and_then(|body| body.get("PartitionKeyRanges")?.as_array());
        list.into_iter().flatten().filter_map(read).collect()
    }

    /// Returns the URL of the write region. It is read each time, because a test may fail the account over.
    fn write_region(&self) -> Option<Url> {
        let config = self.store.config();
        let name = config.write_region_name();
        let regions = config.active_regions();
        let region = regions.iter().find(|region| region.name() == name);
        region.map(|region| region.gateway_url().clone())
    }
}
