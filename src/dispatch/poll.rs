//! Asking the service what others have put into the queues: rarely while idle, often under load.
//!
//! One question covers both queues. Only when its page is full, so that one queue or one instance might hide the rest, each
//! queue is asked on its own, leaving out what is known.

use super::{Offer, OrchestrationHint, WorkHint};
use crate::{
    engine::Engine,
    model::{clock::millis, kind, DocumentId, Millis, Partition, WorkDocument},
    outbox,
    store::{queries, Statement, StoreError},
};
use serde::Deserialize;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;
use tracing::debug;

/// Rows of a page, as the queries say.
const PAGE: usize = 100;
/// At most so many known keys are sent with a question.
const MAX_SKIP: usize = 500;

/// What another process has put into the queue is its own for so long: it knows of it without asking, and two that claim the
/// same thing pay twice.
const GRACE: Duration = Duration::from_millis(100);
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

    /// News shorten the interval at once, silence stretches it. What is too young is looked at again when it is not.
    fn polled(&mut self, found: Found) {
        let active = found.news + found.young > 0;
        self.interval = if active { self.min } else { self.interval.mul_f64(1.5).min(self.max) };
        let pause = if found.young > 0 { self.interval.max(GRACE) } else { self.interval };
        self.next = Instant::now() + pause;
        crate::observe::poll_interval(pause);
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

/// What a poll has found.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    rows: usize,
    news: usize,
    /// Left to the process that put it there.
    young: usize,
}

/// What a row is to this process.
enum Standing {
    News,
    Known,
    Young,
}

/// Asks the service and offers what it returns; an eager caller wants what has just come, too.
pub(super) async fn poll(engine: &Arc<Engine>, pace: &mut Pace, eager: bool) -> Result<(), StoreError> {
    let outcome = ask(engine, eager).await;
    // After a failure the interval stretches, so that an outage is not made worse.
    pace.polled(outcome.as_ref().map_or(Found::default(), |found| *found));
    outcome.map(drop)
}

async fn ask(engine: &Arc<Engine>, eager: bool) -> Result<Found, StoreError> {
    let now = engine.now();
    let statement = queries::DUE.statement().bind("@now", now);
    let mut found = take_in(engine, statement, eager).await?;
    if found.rows >= PAGE {
        let dispatch = &engine.dispatch;
        let known = dispatch.turns.known(MAX_SKIP, now);
        let messages = queries::DUE_MESSAGES.statement().bind("@now", now).bind("@skip", known);
        found.add(take_in(engine, messages, eager).await?);
        let known = dispatch.work.known(MAX_SKIP, now);
        let work = queries::DUE_WORK.statement().bind("@now", now).bind("@skip", known);
        found.add(take_in(engine, work, eager).await?);
    }
    Ok(found)
}

impl Found {
    fn add(&mut self, more: Self) {
        self.news += more.news;
        self.young += more.young;
    }
}

/// Offers the rows of one question.
async fn take_in(engine: &Arc<Engine>, statement: Statement, eager: bool) -> Result<Found, StoreError> {
    let rows: Vec<Row> = engine.store.query_container(statement, engine.deadline()).await?;
    let mut found = Found { rows: rows.len(), ..Found::default() };
    let mut intents = false;
    let old = engine.now().saturating_sub(if eager { 0 } else { millis(GRACE) });
    for row in rows {
        intents |= row.kind == kind::INTENT;
        match offer(engine, row, old) {
            Standing::News => found.news += 1,
            Standing::Young => found.young += 1,
            Standing::Known => {}
        }
    }
    if intents {
        outbox::reconcile_soon(engine);
    }
    debug!(rows = found.rows, news = found.news, young = found.young, "polled");
    Ok(found)
}

/// Offers what a row says, unless it is known, or younger than `old`.
fn offer(engine: &Engine, row: Row, old: Millis) -> Standing {
    let young = row.due > old;
    match row.kind.as_str() {
        kind::INTENT => Standing::Known,
        kind::WORK => offer_work(engine, row, young),
        _ => offer_turn(engine, row, young),
    }
}

fn offer_turn(engine: &Engine, row: Row, young: bool) -> Standing {
    let (dispatch, now) = (&engine.dispatch, engine.now());
    let known = dispatch.turns.peek(&row.instance_id, |hint| hint.knows(&row.id));
    // What a turn of ours has, or had a moment ago, is not news.
    let news = known != Some(true) && !dispatch.recent.is_taken(&row.instance_id, &row.id, now);
    if !news {
        return Standing::Known;
    }
    if young {
        return Standing::Young;
    }
    // A half-finished instance may have no message; the claim looks after it.
    let seq = if row.kind == kind::INSTANCE { String::new() } else { row.seq };
    let mut hint = OrchestrationHint::new(row.instance_id, row.starts);
    hint.seen.push(row.id);
    dispatch.offer_turn(hint, seq, row.due, false);
    Standing::News
}

fn offer_work(engine: &Engine, row: Row, young: bool) -> Standing {
    let (dispatch, now) = (&engine.dispatch, engine.now());
    if dispatch.work.is_busy(&row.seq, now) {
        return Standing::Known;
    }
    let known = dispatch.work.peek(&row.seq, |_| ()).is_some();
    if young && !known {
        return Standing::Young;
    }
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
    dispatch.work.offer(offer, now, |known, _| known.seen_free(now));
    if known {
        return Standing::Known;
    }
    Standing::News
}
