//! Writes of single documents: statuses, conditions, ids, numbers, minimal answers, time to live.

use super::{done, DeepCheck, DeepCheckResult};
use crate::{
    cosmos::{Refusal, StoreError, WriteOutcome},
    model::{DocumentId, Partition},
};
use serde_json::{json, Value};
use std::time::Duration;
use tokio::time::Instant;

/// The largest integer that JSON numbers hold exactly. Deferred messages have it as their due time.
const LARGEST: u64 = (1 << 53) - 1;
/// The time after which a document with a time to live of one second must have disappeared.
const EXPIRY_TIME: Duration = Duration::from_secs(8);

impl DeepCheck<'_> {
    pub(super) async fn points(&mut self) {
        let consequence = "a worker could not tell whether it lost a race";
        let outcome = self.statuses().await;
        self.report("point writes", outcome, consequence);
        let outcome = self.conditions().await;
        self.report("conditions", outcome, "ETags are the locks: two workers could own the same turn");
        let outcome = self.ids().await;
        self.report("ids and keys", outcome, "instances with long or unusual names can't be stored");
        let outcome = self.numbers().await;
        self.report("large numbers", outcome, "deferred messages would be found by polls");
        let outcome = self.minimal_answers().await;
        self.report("short answers", outcome, "every write returns its document, which only adds traffic");
        let outcome = self.time_to_live().await;
        self.report(
            "expiry",
            outcome,
            "markers of delivered messages stay, or a new message counts as delivered for too long",
        );
    }

    /// Creates a document twice, replaces, upserts and deletes it, then deletes and replaces the missing document.
    async fn statuses(&self) -> DeepCheckResult {
        let (store, partition, id) = (self.store, &self.partition, self.id("status"));
        let document = self.document("status", 1, 300);
        self.create("status", &document).await?;
        refused(store.create(partition, &id, &document, self.deadline()).await, Refusal::Exists, "a second create")?;
        done(store.replace(partition, &id, &document, None, self.deadline()).await, "a replace")?;
        done(store.upsert(partition, &id, &document, None, self.deadline()).await, "an upsert")?;
        done(store.delete(partition, &id, None, self.deadline()).await, "a delete")?;
        let absent = Refusal::Absent;
        refused(store.delete(partition, &id, None, self.deadline()).await, absent, "a second delete")?;
        let replaced = store.replace(partition, &id, &document, None, self.deadline()).await;
        refused(replaced, absent, "a replace of a missing document")?;
        Ok("create, replace, upsert and delete; 409 and 404 as expected".to_owned())
    }

    /// The service applies a write with the current ETag, and refuses one with an old ETag.
    async fn conditions(&self) -> DeepCheckResult {
        let (store, partition, id) = (self.store, &self.partition, self.id("condition"));
        let document = self.document("condition", 1, 300);
        let first = self.create("condition", &document).await?;
        let replaced = store.replace(partition, &id, &document, Some(&first), self.deadline()).await;
        let second = done(replaced, "a replace with the current ETag")?;
        if second == first {
            return Err("a replace did not change the ETag".to_owned());
        }
        let stale = Refusal::Stale;
        let replaced = store.replace(partition, &id, &document, Some(&first), self.deadline()).await;
        refused(replaced, stale, "a replace with an old ETag")?;
        let deleted = store.delete(partition, &id, Some(&first), self.deadline()).await;
        refused(deleted, stale, "a delete with an old ETag")?;
        done(store.delete(partition, &id, Some(&second), self.deadline()).await, "a delete with the current ETag")?;
        Ok("an old ETag is answered 412, and the current one is accepted".to_owned())
    }

    /// Writes the longest id and the longest partition key, with the characters that the provider uses.
    async fn ids(&self) -> DeepCheckResult {
        let name = format!("{}-_~3a:", "i".repeat(1_023 - "probe:-_~3a:".len()));
        let id = DocumentId::try_from(format!("probe:{name}"))?;
        let mut document = self.document("id", 1, 300);
        document["id"] = Value::from(id.as_str());
        let created = self.store.create(&self.partition, &id, &document, self.deadline()).await;
        done(created, "a create with an id of 1,023 bytes")?;
        let partition =
            Partition::scratch(&format!("{}{}ü", self.run, "k".repeat(2_048 - "$c:ü".len() - self.run.len())));
        let key = json!({ "id": id, "instanceId": partition, "type": "probe", "ttl": 60 });
        let created = self.store.create(&partition, &id, &key, self.deadline()).await;
        done(created, "a create with a partition key of 2,048 bytes")?;
        done(self.store.delete(&partition, &id, None, self.deadline()).await, "its delete")?;
        Ok("an id of 1,023 bytes and a partition key of 2,048 bytes".to_owned())
    }

    async fn numbers(&self) -> DeepCheckResult {
        let document = self.document("number", LARGEST, 300);
        self.create("number", &document).await?;
        let found = self.read("number").await?.ok_or("the document does not exist")?.0;
        match found["createdAt"].as_u64() {
            Some(LARGEST) => Ok(format!("{LARGEST} is returned as it was stored")),
            _ => Err(format!("{LARGEST} was returned as {}", found["createdAt"])),
        }
    }

    async fn minimal_answers(&self) -> DeepCheckResult {
        let (id, document) = (self.id("short"), self.document("short", 1, 2_000));
        let created = self.store.inner.container.create_item(&self.partition, id.as_str(), &document, None).await;
        let body = created.map_err(|error| error.to_string())?.into_body();
        match body.is_empty() {
            true => Ok("a write does not return its document".to_owned()),
            false => Err("a write returned its document although the request asked for a minimal answer".to_owned()),
        }
    }

    /// A document with a time to live of one second disappears, and its id can be used again.
    async fn time_to_live(&self) -> DeepCheckResult {
        let mut document = self.document("expiry", 1, 300);
        document["ttl"] = Value::from(1);
        self.create("expiry", &document).await?;
        let begun = Instant::now();
        while self.read("expiry").await?.is_some() {
            if begun.elapsed() > EXPIRY_TIME {
                return Err(format!("a document with a time to live of 1 s was there after {EXPIRY_TIME:?}"));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let gone = begun.elapsed();
        document["ttl"] = Value::from(super::TIME_TO_LIVE);
        self.create("expiry", &document).await.map_err(|error| format!("after a document expired, {error}"))?;
        Ok(format!(
            "a document with a time to live of 1 s disappeared after {:.1} s, and its id could be used again",
            gone.as_secs_f64()
        ))
    }
}

/// Checks that the service refused a write for this reason.
fn refused(outcome: Result<WriteOutcome, StoreError>, refusal: Refusal, what: &str) -> Result<(), String> {
    match outcome {
        Ok(WriteOutcome::Refused(found)) if found == refusal => Ok(()),
        Ok(WriteOutcome::Refused(found)) => Err(format!("{what} was answered {found:?} instead of {refusal:?}")),
        Ok(WriteOutcome::Done(etag)) => Err(format!("{what} was applied (ETag {etag})")),
        Err(error) => Err(error.to_string()),
    }
}
