//! Charges: computes the price of each answer, and tracks the stored items on which prices depend.

use std::sync::Arc;

use azure_core::http::Method;
use azure_core::Bytes;
use azure_data_cosmos_driver::binary_json;
use azure_data_cosmos_driver::in_memory_emulator::ConsistencyLevel;
use serde_json::{json, Value};

use crate::answer::Answer;
use crate::container_settings::{ContainerSettings, SettingsCache};
use crate::expiry::{self, Expirations};
use crate::names::{ContainerName, ItemKey};
use crate::prices;
use crate::request::{
    header, read_json, Outgoing, RequestDetails, RequestKind, CONSISTENCY, PARTITION_RANGE, READ_STRATEGY,
};
use crate::service::Service;
use crate::stored_terms::{text_len, StoredTerms, WriteKind};

/// The charges of an account, and its stored items as far as charges and expiry need them.
#[derive(Debug, Default)]
pub(crate) struct Accounting {
    catalog: SettingsCache,
    stored_terms: StoredTerms,
    expirations: Expirations,
}

/// A successful request about items of a container.
struct ChargedRequest<'a> {
    accounting: &'a Accounting,
    service: &'a Service,
    request: &'a Outgoing,
    details: &'a RequestDetails,
    container: ContainerName,
    settings: &'a ContainerSettings,
    factor: f64,
}

impl Accounting {
    /// Sets the charge of an answer, multiplied by `factor`, and records the writes of the request.
    pub async fn charge(
        &self,
        service: &Service,
        request: &Outgoing,
        details: &RequestDetails,
        mut answer: Answer,
        factor: f64,
    ) -> Answer {
        let charge = match ContainerName::of(request) {
            _ if details.kind.is_metadata() => {
                self.record_structure_change(service, request, details, &answer).await;
                0.0
            }
            _ if !answer.is_success() => factor * prices::failed(answer.status),
            Some(container) => {
                let settings = &*self.catalog.settings(service, &container).await;
                let charged =
                    ChargedRequest { accounting: self, service, request, details, container, settings, factor };
                charged.price(&mut answer).await
            }
            None => 0.0,
        };
        answer.set_charge(charge);
        answer
    }

    /// Records a document that was stored without passing the wire.
    pub async fn put(&self, service: &Service, key: &ItemKey, document: &Value) {
        let settings = self.catalog.settings(service, &key.container).await;
        self.write(key, WriteKind::Replace, document, &settings);
    }

    /// Returns the settings of the container that a request addresses.
    pub async fn settings(&self, service: &Service, request: &Outgoing) -> Arc<ContainerSettings> {
        match ContainerName::of(request) {
            Some(container) => self.catalog.settings(service, &container).await,
            None => Arc::default(),
        }
    }

    /// Returns the default time to live of a container's items.
    pub async fn default_ttl(&self, service: &Service, container: &ContainerName) -> Option<i64> {
        self.catalog.settings(service, container).await.default_ttl
    }

    /// Deletes the items whose time to live has passed.
    pub async fn expire(&self, service: &Service) {
        let default_ttl = |key: ItemKey| async move { self.default_ttl(service, &key.container).await };
        let deleted = |key: &ItemKey| {
            self.stored_terms.delete(key);
        };
        self.expirations.drain(service, default_ttl, deleted).await;
    }

    /// Records a successful write and returns its price.
    fn write(&self, key: &ItemKey, put: WriteKind, document: &Value, settings: &ContainerSettings) -> f64 {
        self.expirations.schedule(key, settings.default_ttl, document);
        self.stored_terms.put(key, put, document, &settings.indexing)
    }

    /// Updates the records after a change of a database or a container. Cached settings are read again. The items of a
    /// deleted container are forgotten. The items of a changed container are checked for expiry: the change may give
    /// them a time to live.
    async fn record_structure_change(
        &self,
        service: &Service,
        request: &Outgoing,
        details: &RequestDetails,
        answer: &Answer,
    ) {
        let is_structure = matches!(details.kind, RequestKind::Database | RequestKind::Container);
        if !is_structure || request.method == Method::Get || !answer.is_success() {
            return;
        }
        self.catalog.forget();
        if request.method == Method::Delete {
            let path = format!("{}/", request.url.path());
            self.stored_terms.retain(|name| !format!("{}/", name.path()).starts_with(&path));
        }
        if let Some(container) = ContainerName::of(request) {
            let expires = self.catalog.settings(service, &container).await.default_ttl.is_some();
            let items = if expires { self.stored_terms.items(&container) } else { Vec::new() };
            items.iter().for_each(|key| self.expirations.check_at(key, expiry::now()));
        }
    }
}

impl ChargedRequest<'_> {
    async fn price(&self, answer: &mut Answer) -> f64 {
        if let Some(operations) = self.details.operations() {
            return self.price_batch(operations, answer);
        }
        self.factor
            * match self.details.kind {
                RequestKind::Create => self.put_body(WriteKind::Create),
                RequestKind::Upsert if answer.status == 201 => self.put_body(WriteKind::Create),
                RequestKind::Upsert | RequestKind::Replace => self.put_body(WriteKind::Replace),
                RequestKind::Delete => self.accounting.stored_terms.delete(&self.key()),
                RequestKind::Read => self.quorum() * prices::read(body_len(answer)),
                RequestKind::Query | RequestKind::ChangeFeed => {
                    self.quorum() * prices::query(self.partitions().await, body_len(answer))
                }
                RequestKind::Other if self.request.method == Method::Patch => self.patch().await,
                // The gateway computes a query plan itself, so the plan is free.
                _ => 0.0,
            }
    }

    /// Returns the sum of the prices of the operations, and writes each price into its result.
    fn price_batch(&self, operations: &[Value], answer: &mut Answer) -> f64 {
        let Some(Value::Array(mut results)) = read_json(&answer.body) else { return 0.0 };
        let mut sum = 0.0;
        for (operation, result) in operations.iter().zip(&mut results) {
            let charge = round(self.factor * self.operation(operation, result));
            result["requestCharge"] = json!(charge);
            sum += charge;
        }
        answer.body = Bytes::from(Value::Array(results).to_string());
        sum
    }

    /// Returns the price of one operation of a batch. A batch runs on the primary replica, so its reads need no quorum.
    fn operation(&self, operation: &Value, result: &Value) -> f64 {
        let status = result["statusCode"].as_u64().and_then(|status| u16::try_from(status).ok()).unwrap_or(500);
        if status >= 400 {
            return prices::failed(status);
        }
        let body = &operation["resourceBody"];
        match operation["operationType"].as_str() {
            Some("Read") => prices::read(result.get("resourceBody").map_or(0, text_len)),
            Some("Delete") => self.accounting.stored_terms.delete(&self.operation_key(operation)),
            Some(_) if status == 201 => self.put(&self.operation_key(operation), WriteKind::Create, body),
            _ => self.put(&self.operation_key(operation), WriteKind::Replace, body),
        }
    }

    fn put_body(&self, put: WriteKind) -> f64 {
        let document = self.details.body.as_ref().unwrap_or(&Value::Null);
        self.put(&self.key(), put, document)
    }

    fn put(&self, key: &ItemKey, put: WriteKind, document: &Value) -> f64 {
        self.accounting.write(key, put, document, self.settings)
    }

    /// Returns the price of a patch. The answer to a patch may lack the document, so it is read from the store.
    async fn patch(&self) -> f64 {
        let key = self.key();
        let mut document = self.service.read_item(&key).await.unwrap_or_default();
        if let Some(fields) = document.as_object_mut() {
            // The client does not pay for system properties.
            fields.retain(|name, _| !name.starts_with('_'));
        }
        let body = read_json(&self.request.body).unwrap_or_default();
        let operations = body.get("operations").unwrap_or(&body).as_array().map_or(0, Vec::len);
        self.put(&key, WriteKind::Replace, &document) + prices::PATCHED_PROPERTY * operations as f64
    }

    fn key(&self) -> ItemKey {
        self.key_of(self.details.partition_key.as_deref(), self.details.document_id.as_deref())
    }

    /// Returns the key of an operation's item. In a batch that is not atomic, each operation may name its own partition
    /// key.
    fn operation_key(&self, operation: &Value) -> ItemKey {
        let partition_key = operation["partitionKey"].as_str().or(self.details.partition_key.as_deref());
        let id = operation["id"].as_str().or_else(|| operation["resourceBody"]["id"].as_str());
        self.key_of(partition_key, id)
    }

    fn key_of(&self, partition_key: Option<&str>, id: Option<&str>) -> ItemKey {
        ItemKey::new(self.container.clone(), partition_key.unwrap_or_default(), id.unwrap_or_default())
    }

    /// Returns the number of physical partitions that a query page visits.
    async fn partitions(&self) -> usize {
        let names_one =
            self.details.partition_key.is_some() || header(&self.request.headers, &PARTITION_RANGE).is_some();
        if names_one {
            return 1;
        }
        self.service.ranges(&self.container).await.len()
    }

    /// Returns the factor for the consistency of a read. A quorum read costs twice as much.
    fn quorum(&self) -> f64 {
        let default = self.service.store().config().consistency();
        if is_quorum_read(self.request, default) {
            prices::QUORUM
        } else {
            1.0
        }
    }
}

/// Whether a read needs a quorum. Its strategy decides, else its consistency level, else the account's level.
fn is_quorum_read(request: &Outgoing, default: ConsistencyLevel) -> bool {
    let strategy = header(&request.headers, &READ_STRATEGY).filter(|name| !name.eq_ignore_ascii_case("Default"));
    let level = strategy.or_else(|| header(&request.headers, &CONSISTENCY)).unwrap_or(default.as_str());
    let quorum = ["Strong", "BoundedStaleness", "LatestCommitted", "GlobalStrong"];
    quorum.iter().any(|name| name.eq_ignore_ascii_case(level))
}

/// Returns the length of an answer as text, even if the wire carries binary JSON.
fn body_len(answer: &Answer) -> usize {
    if binary_json::is_binary(&answer.body) {
        read_json(&answer.body).as_ref().map_or(0, text_len)
    } else {
        answer.body.len()
    }
}

/// Rounds a charge to two decimals, as in the header.
fn round(charge: f64) -> f64 {
    (charge * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use azure_core::http::headers::{HeaderName, Headers};
    use azure_core::http::Url;

    use super::*;

    fn read_with(name: HeaderName, value: &'static str) -> Outgoing {
        let mut headers = Headers::new();
        headers.insert(name, value);
        let url = Url::parse("https://local.emulator.local/").unwrap();
        Outgoing { client: None, method: Method::Get, url, headers, body: Bytes::new() }
    }

    #[test]
    fn the_strategy_the_level_or_the_account_makes_a_read_a_quorum_read() {
        let session = ConsistencyLevel::Session;
        assert!(is_quorum_read(&read_with(READ_STRATEGY, "LatestCommitted"), session));
        assert!(is_quorum_read(&read_with(CONSISTENCY, "Strong"), session));
        assert!(is_quorum_read(&read_with(READ_STRATEGY, "Default"), ConsistencyLevel::BoundedStaleness));
        assert!(!is_quorum_read(&read_with(READ_STRATEGY, "Eventual"), ConsistencyLevel::Strong));
        assert!(!is_quorum_read(&read_with(CONSISTENCY, "Session"), ConsistencyLevel::Strong));
    }
}
