//! Asking the service what others have put into the queues: rarely while idle, often under load.
//!
//! One question covers both queues. Only when its page is full, so that one queue or one instance might hide the rest, each
//! queue is asked on its own, leaving out what is known.

use super::{Offer, OrchestrationHint, WorkHint};
use crate::{
    engine::Engine,
    model::{kind, DocumentId, Millis, Partition, WorkDocument},
    store::{queries, Statement, StoreError},
};
use serde::Deserialize;
use std::time::Duration;
use tokio::time::Instant;
use tracing::debug;

/// Rows of a page, as the queries say.
const PAGE: usize = 100;
/// At most so many known keys are sent with a question.
const MAX_SKIP: usize = 500;

/// Under load, a poll may be late by so much.
const OVERDUE: Duration = Duration::from_secs(1);

/// When the service is asked next.
pub(super) struct Pace {
    min: Duration,
    max: Duration,
    interval: Duration,
    next: Instant,
}

impl Pace {
    pub(super) fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, interval: min, next: Instant::now() }
    }

    /// When the next poll is due.
    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// When a poll is overdue, whether or not there is other work: what others enqueue must not starve.
    pub(super) fn overdue(&self) -> Instant {
        self.next + self.max.min(OVERDUE)
    }

    /// News shorten the interval at once, silence stretches it.
    fn polled(&mut self, news: usize) {
        self.interval = if news > 0 { self.min } else { self.interval.mul_f64(1.5).min(self.max) };
        self.next = Instant::now() + self.interval;
    }
}

/// A row of a poll.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    id: DocumentId,
    instance_id: Partition,
    #[serde(rename = "type")]
    kind: String,
    due: Millis,
    #[serde(default)]
    seq: String,
    #[serde(default)]
    starts: bool,
    #[serde(default)]
    tag: Option<String>,
    #[serde(default)]
    session_id: Option<String>,
}

/// Asks the service and offers what it returns.
pub(super) async fn poll(engine: &Engine, pace: &mut Pace) -> Result<(), StoreError> {
    let outcome = ask(engine).await;
    match &outcome {
        Ok(news) => pace.polled(*news),
        // The interval stretches, so that an outage is not made worse.
        Err(_) => pace.polled(0),
    }
    outcome.map(drop)
}

async fn ask(engine: &Engine) -> Result<usize, StoreError> {
    let now = engine.now();
    let statement = queries::DUE.statement().bind("@now", now);
    let (rows, mut news) = take_in(engine, statement).await?;
    if rows >= PAGE {
        let dispatch = &engine.dispatch;
        let known = dispatch.turns.known(MAX_SKIP, now);
        let messages = queries::DUE_MESSAGES.statement().bind("@now", now).bind("@skip", known);
        news += take_in(engine, messages).await?.1;
        let known = dispatch.work.known(MAX_SKIP, now);
        let work = queries::DUE_WORK.statement().bind("@now", now).bind("@skip", known);
        news += take_in(engine, work).await?.1;
    }
    Ok(news)
}

/// Offers the rows of one question; how many there were, and how many of them were news.
async fn take_in(engine: &Engine, statement: Statement) -> Result<(usize, usize), StoreError> {
    let rows: Vec<Row> = engine.store.query_container(statement, engine.deadline()).await?;
    let count = rows.len();
    let news = rows.into_iter().filter_map(|row| offer(engine, row)).count();
    debug!(rows = count, news, "polled");
    Ok((count, news))
}

/// Offers what a row says, unless it is known.
fn offer(engine: &Engine, row: Row) -> Option<()> {
    match row.kind.as_str() {
        kind::WORK => offer_work(engine, row),
        _ => offer_turn(engine, row),
    }
}

fn offer_turn(engine: &Engine, row: Row) -> Option<()> {
    let (dispatch, now) = (&engine.dispatch, engine.now());
    let known = dispatch.turns.peek(&row.instance_id, |hint| hint.knows(&row.id));
    // What a turn of ours has, or had a moment ago, is not news.
    let news = known != Some(true) && !dispatch.recent.is_taken(&row.instance_id, &row.id, now);
    if !news {
        return None;
    }
    // A half-finished instance may have no message; the claim looks after it.
    let seq = if row.kind == kind::INSTANCE { String::new() } else { row.seq };
    let mut hint = OrchestrationHint::new(row.instance_id, row.starts);
    hint.seen.push(row.id);
    dispatch.offer_turn(hint, seq, row.due, false);
    Some(())
}

fn offer_work(engine: &Engine, row: Row) -> Option<()> {
    let (dispatch, now) = (&engine.dispatch, engine.now());
    if dispatch.work.is_busy(&row.seq, now) {
        return None;
    }
    let known = dispatch.work.peek(&row.seq, |_| ()).is_some();
    let (key, seq, due) = (row.seq.clone(), row.seq.clone(), row.due);
    // The claim reads the rest: a poll would pay for payloads that another process takes.
    let document = WorkDocument {
        id: row.id,
        instance_id: row.instance_id,
        kind: kind::WORK.to_owned(),
        due: row.due,
        seq: row.seq,
        attempts: 0,
        session_id: row.session_id,
        tag: row.tag,
        lock: None,
        item: None,
        etag: None,
    };
    // The row says that nobody holds it now, whatever an attempt before has met.
    let offer = Offer { key, hint: WorkHint::new(document), seq, due, urgent: true };
    dispatch.work.offer(offer, now, |_, _| {});
    (!known).then_some(())
}
