//! The store behind the wire. What asks it here is neither counted nor meets a rule.

use std::sync::Arc;

use azure_core::http::{headers::Headers, Method, Url};
use azure_core::Bytes;
use azure_data_cosmos_driver::in_memory_emulator::{EmulatorStore, InMemoryEmulatorHttpClient};
use serde_json::Value;

use crate::answer::{Answer, Lost};
use crate::ledger::ItemKey;
use crate::request::{encode, read_json, Outgoing, PARTITION_KEY};

/// The store behind the wire.
pub(crate) struct Service {
    emulator: Arc<InMemoryEmulatorHttpClient>,
    store: Arc<EmulatorStore>,
}

/// A container's name and its database's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ContainerName {
    pub database: String,
    pub container: String,
}

impl ContainerName {
    pub fn new(database: &str, container: &str) -> Self {
        Self { database: database.to_owned(), container: container.to_owned() }
    }

    /// The container that a request is about.
    pub fn of(request: &Outgoing) -> Option<Self> {
        match request.segments().as_slice() {
            [dbs, database, colls, container, ..] if dbs == "dbs" && colls == "colls" => {
                Some(Self { database: database.clone(), container: container.clone() })
            }
            _ => None,
        }
    }

    /// The container's path.
    pub fn path(&self) -> String {
        format!("/dbs/{}/colls/{}", encode(&self.database), encode(&self.container))
    }
}

/// A physical partition: its id and the effective partition keys that it holds.
#[derive(Clone, Debug)]
pub(crate) struct Range {
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

    /// Hands a request to the emulator as it is.
    pub async fn forward(&self, request: &Outgoing) -> Result<Answer, Lost> {
        let response = self.emulator.execute_request(&request.to_core()).await;
        Answer::read(response.map_err(|error| Lost::Unroutable(Box::new(error)))?).await
    }

    /// A request to the write region, without headers and body.
    pub fn request(&self, method: Method, path: &str) -> Option<Outgoing> {
        let mut url = self.write_region()?;
        url.set_path(path);
        Some(Outgoing { client: None, method, url, headers: Headers::new(), body: Bytes::new() })
    }

    /// What the write region holds at a path; none if nothing is there.
    pub async fn read(&self, path: &str) -> Option<Value> {
        let answer = self.forward(&self.request(Method::Get, path)?).await.ok()?;
        answer.is_success().then(|| serde_json::from_slice(&answer.body).ok()).flatten()
    }

    /// An item as it is in the write region; none if there is no such item.
    pub async fn read_item(&self, key: &ItemKey) -> Option<Value> {
        let answer = self.forward(&self.item_request(Method::Get, key)?).await.ok()?;
        answer.is_success().then(|| read_json(&answer.body)).flatten()
    }

    /// A request about an item to the write region.
    pub fn item_request(&self, method: Method, key: &ItemKey) -> Option<Outgoing> {
        let mut request = self.request(method, &key.path())?;
        request.headers.insert(PARTITION_KEY, key.partition_key.clone());
        Some(request)
    }

    /// The container's physical partitions; none if there is no such container.
    pub async fn ranges(&self, container: &ContainerName) -> Vec<Range> {
        let ranges = self.read(&format!("{}/pkranges", container.path())).await;
        let text = |range: &Value, name: &str| Some(range.get(name)?.as_str()?.to_owned());
        let read = |range: &Value| {
            let (min, max) = (text(range, "minInclusive")?, text(range, "maxExclusive")?);
            Some(Range { id: text(range, "id")?, min, max })
        };
        let list = ranges.as_ref().and_then(|body| body.get("PartitionKeyRanges")?.as_array());
        list.into_iter().flatten().filter_map(read).collect()
    }

    /// Read each time: a test may fail the account over to another region.
    fn write_region(&self) -> Option<Url> {
        let config = self.store.config();
        let name = config.write_region_name();
        let regions = config.active_regions();
        let region = regions.iter().find(|region| region.name() == name);
        region.map(|region| region.gateway_url().clone())
    }
}
