//! What the wire knows of the stored items, and the charge of each answer that follows from it.

use std::sync::Arc;

use azure_core::http::Method;
use azure_core::Bytes;
use azure_data_cosmos_driver::binary_json;
use azure_data_cosmos_driver::in_memory_emulator::ConsistencyLevel;
use serde_json::{json, Value};

use crate::answer::Answer;
use crate::catalog::{Catalog, Settings};
use crate::expiry::{self, Expirations};
use crate::ledger::{text_len, ItemKey, Ledger, Put};
use crate::prices;
use crate::request::{header, read_json, Facts, Outgoing, RequestKind, CONSISTENCY, PARTITION_RANGE, READ_STRATEGY};
use crate::service::{ContainerName, Service};

/// The stored items of an account, as its wire knows them.
#[derive(Debug, Default)]
pub(crate) struct Records {
    catalog: Catalog,
    ledger: Ledger,
    expirations: Expirations,
}

/// A request that succeeded in a container.
struct Exchange<'a> {
    records: &'a Records,
    service: &'a Service,
    request: &'a Outgoing,
    facts: &'a Facts,
    container: ContainerName,
    settings: &'a Settings,
    factor: f64,
}

impl Records {
    /// Writes the charge into an answer, times `factor`, and records what the request has written.
    pub async fn settle(
        &self,
        service: &Service,
        request: &Outgoing,
        facts: &Facts,
        mut answer: Answer,
        factor: f64,
    ) -> Answer {
        let charge = match ContainerName::of(request) {
            _ if facts.kind.is_metadata() => {
                self.note_structure(service, request, facts, &answer).await;
                0.0
            }
            _ if !answer.is_success() => factor * prices::failed(answer.status),
            Some(container) => {
                let settings = &*self.catalog.settings(service, &container).await;
                let exchange = Exchange { records: self, service, request, facts, container, settings, factor };
                exchange.charge(&mut answer).await
            }
            None => 0.0,
        };
        answer.set_charge(charge);
        answer
    }

    /// Records a document that was put past the wire.
    pub async fn put(&self, service: &Service, key: &ItemKey, document: &Value) {
        let settings = self.catalog.settings(service, &key.container).await;
        self.write(key, Put::Replace, document, &settings);
    }

    /// The settings of the container that a request is for.
    pub async fn settings(&self, service: &Service, request: &Outgoing) -> Arc<Settings> {
        match ContainerName::of(request) {
            Some(container) => self.catalog.settings(service, &container).await,
            None => Arc::default(),
        }
    }

    /// The default time to live of a container's items.
    pub async fn default_ttl(&self, service: &Service, container: &ContainerName) -> Option<i64> {
        self.catalog.settings(service, container).await.default_ttl
    }

    /// Deletes the items whose time to live is over.
    pub async fn expire(&self, service: &Service) {
        let default_ttl = |key: ItemKey| async move { self.default_ttl(service, &key.container).await };
        let deleted = |key: &ItemKey| {
            self.ledger.delete(key);
        };
        self.expirations.drain(service, default_ttl, deleted).await;
    }

    /// Records a write that succeeded and returns its price.
    fn write(&self, key: &ItemKey, put: Put, document: &Value, settings: &Settings) -> f64 {
        self.expirations.schedule(key, settings.default_ttl, document);
        self.ledger.put(key, put, document, &settings.indexing)
    }

    /// Reads settings again after a change of a database or a container, and forgets the items of those deleted. The
    /// items of a container whose settings changed are checked: they may have got a time to live.
    async fn note_structure(&self, service: &Service, request: &Outgoing, facts: &Facts, answer: &Answer) {
        let is_structure = matches!(facts.kind, RequestKind::Database | RequestKind::Container);
        if !is_structure || request.method == Method::Get || !answer.is_success() {
            return;
        }
        self.catalog.forget();
        if request.method == Method::Delete {
            let path = format!("{}/", request.url.path());
            self.ledger.retain(|name| !format!("{}/", name.path()).starts_with(&path));
        }
        if let Some(container) = ContainerName::of(request) {
            let expires = self.catalog.settings(service, &container).await.default_ttl.is_some();
            let items = if expires { self.ledger.items(&container) } else { Vec::new() };
            items.iter().for_each(|key| self.expirations.check_at(key, expiry::now()));
        }
    }
}

impl Exchange<'_> {
    async fn charge(&self, answer: &mut Answer) -> f64 {
        if let Some(operations) = self.facts.operations() {
            return self.charge_batch(operations, answer);
        }
        self.factor
            * match self.facts.kind {
                RequestKind::Create => self.put_body(Put::Create),
                RequestKind::Upsert if answer.status == 201 => self.put_body(Put::Create),
                RequestKind::Upsert | RequestKind::Replace => self.put_body(Put::Replace),
                RequestKind::Delete => self.records.ledger.delete(&self.key()),
                RequestKind::Read => self.quorum() * prices::read(body_len(answer)),
                RequestKind::Query | RequestKind::ChangeFeed => {
                    self.quorum() * prices::query(self.partitions().await, body_len(answer))
                }
                RequestKind::Other if self.request.method == Method::Patch => self.patch().await,
                // A query plan is the gateway's own work.
                _ => 0.0,
            }
    }

    /// The sum of the operations, each of which gets its own charge in the answer.
    fn charge_batch(&self, operations: &[Value], answer: &mut Answer) -> f64 {
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

    /// The price of one operation of a batch. A batch runs on the primary replica, so its reads ask no quorum.
    fn operation(&self, operation: &Value, result: &Value) -> f64 {
        let status = result["statusCode"].as_u64().and_then(|status| u16::try_from(status).ok()).unwrap_or(500);
        if status >= 400 {
            return prices::failed(status);
        }
        let body = &operation["resourceBody"];
        match operation["operationType"].as_str() {
            Some("Read") => prices::read(result.get("resourceBody").map_or(0, text_len)),
            Some("Delete") => self.records.ledger.delete(&self.operation_key(operation)),
            Some(_) if status == 201 => self.put(&self.operation_key(operation), Put::Create, body),
            _ => self.put(&self.operation_key(operation), Put::Replace, body),
        }
    }

    fn put_body(&self, put: Put) -> f64 {
        let document = self.facts.body.as_ref().unwrap_or(&Value::Null);
        self.put(&self.key(), put, document)
    }

    fn put(&self, key: &ItemKey, put: Put, document: &Value) -> f64 {
        self.records.write(key, put, document, self.settings)
    }

    /// The answer to a patch need not hold the document, so the store is asked for it.
    async fn patch(&self) -> f64 {
        let key = self.key();
        let mut document = self.service.read_item(&key).await.unwrap_or_default();
        if let Some(fields) = document.as_object_mut() {
            // The system's own properties are not the client's to pay for.
            fields.retain(|name, _| !name.starts_with('_'));
        }
        let body = read_json(&self.request.body).unwrap_or_default();
        let operations = body.get("operations").unwrap_or(&body).as_array().map_or(0, Vec::len);
        self.put(&key, Put::Replace, &document) + prices::PATCHED_PROPERTY * operations as f64
    }

    fn key(&self) -> ItemKey {
        self.key_of(self.facts.partition_key.as_deref(), self.facts.document_id.as_deref())
    }

    /// In a batch that is not atomic each operation may name its partition key.
    fn operation_key(&self, operation: &Value) -> ItemKey {
        let partition_key = operation["partitionKey"].as_str().or(self.facts.partition_key.as_deref());
        let id = operation["id"].as_str().or_else(|| operation["resourceBody"]["id"].as_str());
        self.key_of(partition_key, id)
    }

    fn key_of(&self, partition_key: Option<&str>, id: Option<&str>) -> ItemKey {
        ItemKey::new(self.container.clone(), partition_key.unwrap_or_default(), id.unwrap_or_default())
    }

    /// How many physical partitions a query page visits.
    async fn partitions(&self) -> usize {
        let names_one = self.facts.partition_key.is_some() || header(&self.request.headers, &PARTITION_RANGE).is_some();
        if names_one {
            return 1;
        }
        self.service.ranges(&self.container).await.len()
    }

    /// A read that asks a quorum costs double.
    fn quorum(&self) -> f64 {
        let default = self.service.store().config().consistency();
        if is_quorum_read(self.request, default) {
            prices::QUORUM
        } else {
            1.0
        }
    }
}

/// Whether a read is strong: by its strategy, else by its consistency level, else by the account's.
fn is_quorum_read(request: &Outgoing, default: ConsistencyLevel) -> bool {
    let strategy = header(&request.headers, &READ_STRATEGY).filter(|name| !name.eq_ignore_ascii_case("Default"));
    let level = strategy.or_else(|| header(&request.headers, &CONSISTENCY)).unwrap_or(default.as_str());
    let quorum = ["Strong", "BoundedStaleness", "LatestCommitted", "GlobalStrong"];
    quorum.iter().any(|name| name.eq_ignore_ascii_case(level))
}

/// The length of an answer as text, also where the wire carries binary JSON.
fn body_len(answer: &Answer) -> usize {
    if binary_json::is_binary(&answer.body) {
        read_json(&answer.body).as_ref().map_or(0, text_len)
    } else {
        answer.body.len()
    }
}

/// Charges have two decimals, as in the header.
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
    fn a_read_asks_a_quorum_by_its_strategy_its_level_or_the_account() {
        let session = ConsistencyLevel::Session;
        assert!(is_quorum_read(&read_with(READ_STRATEGY, "LatestCommitted"), session));
        assert!(is_quorum_read(&read_with(CONSISTENCY, "Strong"), session));
        assert!(is_quorum_read(&read_with(READ_STRATEGY, "Default"), ConsistencyLevel::BoundedStaleness));
        assert!(!is_quorum_read(&read_with(READ_STRATEGY, "Eventual"), ConsistencyLevel::Strong));
        assert!(!is_quorum_read(&read_with(CONSISTENCY, "Session"), ConsistencyLevel::Strong));
    }
}
