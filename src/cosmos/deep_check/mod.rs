//! `check --deep`: every assumption that the provider makes about the service, tried out on the account.
//!
//! All of it happens in a partition of its own, in documents that no query of the provider returns. They are removed at the
//! end. Should that fail, they expire after an hour where time to live is on.
//!
//! Each assumption becomes one [`CheckLine`]: fine, or what the service answered and what follows from that.

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

/// How long one call may take. Throttling on a small container is ridden out.
const TIME: Duration = Duration::from_secs(30);
/// When what a check that died left behind expires.
const TIME_TO_LIVE: u32 = 3_600;

/// Above any time of creation; twice as much is still a number that JSON holds exactly.
const FIRST: u64 = 4_000_000_000_000;

/// The verdict on one assumption: `Ok` with the observation, `Err` with the answer that differs.
type DeepCheckResult = Result<String, String>;

/// A check under way.
pub(super) struct Deep<'a> {
    store: &'a Store,
    partition: Partition,
    /// The name of this run. Another one may be under way, or have left something behind.
    run: String,
    /// The documents of the paging check are told from all others by their numbers, which begin here.
    first: u64,
    lines: Vec<(String, CheckLine)>,
}

/// Tries out every assumption.
pub(super) async fn run(store: &Store) -> Vec<(String, CheckLine)> {
    let randomness = &store.inner.randomness;
    let run = randomness.token();
    let first = FIRST + (randomness.fraction() * FIRST as f64) as u64;
    let mut deep = Deep { store, partition: Partition::scratch(&run), run, first, lines: Vec::new() };
    deep.points().await;
    deep.batches().await;
    deep.reads().await;
    deep.queries().await;
    deep.prices().await;
    deep.clean_up().await;
    deep.lines
}

impl Deep<'_> {
    /// Notes what was found. `follows` says what it means for the provider where the service behaves otherwise.
    fn note(&mut self, subject: &str, outcome: DeepCheckResult, follows: &str) {
        let line = match outcome {
            Ok(seen) => CheckLine::Ok(seen),
            Err(answer) => CheckLine::Differs(format!("{answer}. What follows: {follows}")),
        };
        self.lines.push((subject.to_owned(), line));
    }

    fn deadline(&self) -> Deadline {
        Deadline::after(TIME)
    }

    fn id(&self, name: &str) -> DocumentId {
        DocumentId::new("probe", &[name])
    }

    /// A document of about so many bytes.
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

    /// Removes what the check wrote.
    async fn clean_up(&mut self) {
        let outcome = self.remove_all().await.map_err(text);
        let follows = format!("delete what is left in partition {}", self.partition);
        let (requests, units) = (self.store.statistics().requests(), self.store.statistics().charge());
        let seen =
            |count| format!("{count} documents were removed; the check took {requests} requests and {units:.0} RU");
        self.note("clean-up", outcome.map(seen), &follows);
    }

    async fn remove_all(&self) -> Result<usize, StoreError> {
        let contents = || super::queries::CONTENTS.statement();
        let ask =
            |statement| self.store.query_partition::<Value>(&self.partition, statement, QueryTimeout::PerPage(TIME));
        let rows = match ask(contents().authoritative()).await {
            // An account that refuses quorum reads must not keep what the check wrote.
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

/// The ETag of a write that must have been done.
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
