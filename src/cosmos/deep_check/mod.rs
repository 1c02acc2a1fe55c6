//! `check --deep`: tests every assumption that the provider makes about the service.
//!
//! The check writes to a partition of its own, with documents that no query of the provider returns. It removes them
//! at the end. If that fails, they expire after an hour, provided that time to live is on.
//!
//! Each assumption becomes one [`CheckLine`]: the observation, or the deviating answer and its consequence.

mod batches;
mod points;
mod prices;
mod queries;
mod reads;

use super::{check::CheckLine, Deadline, Freshness, QueryTimeout, Store, StoreError, WriteOutcome};
use crate::model::{DocumentId, Partition};
use azure_core::http::Etag;
use serde_json::{json, Value};
use std::time::Duration;

/// The time limit of one call. It leaves time for retries on a small, throttled container.
const TIME: Duration = Duration::from_secs(30);
/// The time to live of the documents, in seconds, for a check that dies before it removes them.
const TIME_TO_LIVE: u32 = 3_600;

/// Larger than any creation time. JSON holds twice this number exactly.
const FIRST: u64 = 4_000_000_000_000;

/// The result for one assumption: `Ok` with the observation, `Err` with the deviating answer.
type DeepCheckResult = Result<String, String>;

/// A running check.
pub(super) struct DeepCheck<'a> {
    store: &'a Store,
    partition: Partition,
    /// The name of this run. Another run may be active, or may have left documents behind.
    run: String,
    /// The first number of the documents of the paging check. The numbers distinguish them from all other documents.
    first: u64,
    lines: Vec<(String, CheckLine)>,
}

/// Tests every assumption.
pub(super) async fn run(store: &Store) -> Vec<(String, CheckLine)> {
    let randomness = &store.inner.randomness;
    let run = randomness.token();
    let first = FIRST + (randomness.fraction() * FIRST as f64) as u64;
    let mut check = DeepCheck { store, partition: Partition::scratch(&run), run, first, lines: Vec::new() };
    check.points().await;
    check.batches().await;
    check.reads().await;
    check.queries().await;
    check.prices().await;
    check.clean_up().await;
    check.lines
}

impl DeepCheck<'_> {
    /// Adds a line. `consequence` says what a deviation means for the provider.
    fn report(&mut self, subject: &str, outcome: DeepCheckResult, consequence: &str) {
        let line = match outcome {
            Ok(observation) => CheckLine::Ok(observation),
            Err(answer) => CheckLine::Differs(format!("{answer}. Consequence: {consequence}")),
        };
        self.lines.push((subject.to_owned(), line));
    }

    fn deadline(&self) -> Deadline {
        Deadline::after(TIME)
    }

    fn id(&self, name: &str) -> DocumentId {
        DocumentId::new("probe", &[name])
    }

    /// A document of about `bytes` bytes.
    fn document(&self, name: &str, number: u64, bytes: usize) -> Value {
        let mut document = json!({
            "id": self.id(name), "instanceId": self.partition, "type": "probe", "createdAt": number, "ttl": TIME_TO_LIVE,
            "padding": "",
        });
        let missing = bytes.saturating_sub(document.to_string().len());
        document["padding"] = Value::from("x".repeat(missing));
        document
    }

    async fn create(&self, name: &str, document: &Value) -> Result<Etag, String> {
        let created = self.store.create(&self.partition, &self.id(name), document, self.deadline()).await;
        done(created, "a create")
    }

    async fn read(&self, name: &str) -> Result<Option<(Value, Etag)>, String> {
        let freshness = Freshness::Authoritative;
        let found = self.store.read::<Value>(&self.partition, &self.id(name), freshness, self.deadline()).await;
        Ok(found.map_err(text)?.map(|found| (found.document, found.etag)))
    }

    /// Removes the documents of the check.
    async fn clean_up(&mut self) {
        let outcome = self.remove_all().await.map_err(text);
        let consequence = format!("delete the remaining documents in partition {}", self.partition);
        let (requests, units) = (self.store.statistics().requests(), self.store.statistics().charge());
        let observation =
            |count| format!("{count} documents were removed; the check took {requests} requests and {units:.0} RU");
        self.report("clean-up", outcome.map(observation), &consequence);
    }

    async fn remove_all(&self) -> Result<usize, StoreError> {
        let contents = || super::queries::CONTENTS.statement();
        let ask =
            |statement| self.store.query_partition::<Value>(&self.partition, statement, QueryTimeout::PerPage(TIME));
        let rows = match ask(contents().authoritative()).await {
            // The check removes its documents even on an account that refuses quorum reads.
            Err(StoreError::Rejected { .. }) => ask(contents()).await?,
            rows => rows?,
        };
        let ids = rows.iter().filter_map(|row| DocumentId::try_from(row["id"].as_str()?.to_owned()).ok());
        let mut removed = 0;
        for id in ids {
            self.store.delete(&self.partition, &id, None, self.deadline()).await?;
            removed += 1;
        }
        Ok(removed)
    }
}

/// The ETag of a write that must succeed.
fn done(outcome: Result<WriteOutcome, StoreError>, what: &str) -> Result<Etag, String> {
    match outcome {
        Ok(WriteOutcome::Done(etag)) => Ok(etag),
        Ok(WriteOutcome::Refused(refusal)) => Err(format!("{what} was refused: {refusal:?}")),
        Err(error) => Err(error.to_string()),
    }
}

fn text(error: StoreError) -> String {
    error.to_string()
}
