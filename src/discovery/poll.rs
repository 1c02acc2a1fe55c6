//! Polls: queries for due work, one physical partition at a time, in pages, oldest first.
//!
//! The cost of a poll does not depend on the length of the queues. If no dispatcher of this process can take the rows
//! of a page, the poll reads the next page, so that no row hides those behind it. If that takes too long, the next poll
//! continues from there.
//!
//! A row becomes a candidate at once if
//!
//! - its slot belongs to this process and no living worker knows of the row, or
//! - a wake-up has named its slot.
//!
//! Otherwise it becomes a candidate after [`GRACE`]. So two processes rarely claim the same row, and the rows that a
//! dead process knew are not lost.

use super::{members::View, ActivityCandidate, Discovery, Offer, TurnCandidate};
use crate::{
    cosmos::{queries, Pages, QueryTimeout, Rows, Statement, StoreError, QUERY_TIME},
    engine::Engine,
    model::{kind, ActivityDocument, DocumentId, MessageDocument, Millis, Partition, Slot, SlotRange, Tags, Unknown},
    outbox,
};
use azure_data_cosmos::feed::FeedRange;
use serde::{de::DeserializeOwned, Deserialize};
use std::{num::NonZeroU32, sync::Arc};
use tracing::debug;

/// What another process knows of, or looks after, is left to it for so long.
pub(super) const GRACE: Millis = 2_000;
/// Rows of a page.
const PAGE: u32 = 50;
/// Rows of a page that follows one which held nothing for us.
const NEXT_PAGE: u32 = 250;
/// Pages of one look.
const MOST_PAGES: usize = 8;
/// Activities that are looked at for each worker that waits: others may be faster.
const WORK_EACH: usize = 2;
const MOST_WORK: usize = 32;
/// Of activities that others have too many of, as many are seen, and so many taken at most.
const HELP: usize = 200;
const HELP_EACH: usize = 64;

/// Which queue is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum QueueKind {
    Turns,
    Work,
}

/// A question to one physical partition, or to all.
#[derive(Clone, Debug)]
pub(super) struct PollRequest<'a> {
    /// None asks the whole container.
    pub(super) range: Option<&'a FeedRange>,
    /// Of these slots only.
    pub(super) slots: SlotRange,
    /// Slots that a bell has named: what lies there is for us, whoever knows of it, and a replica that lags must not hide it.
    pub(super) named: &'a [Slot],
    /// Every row becomes a candidate at once, because a fetch without a wait time must see the present state.
    pub(super) eager: bool,
    /// Timers that are due by then are taken in, too.
    pub(super) ahead: Millis,
}

impl<'a> PollRequest<'a> {
    pub(super) fn at(range: Option<&'a FeedRange>, slots: SlotRange) -> Self {
        Self { range, slots, named: &[], eager: false, ahead: 0 }
    }
}

/// What a look has found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PollResult {
    /// What was not known and can be tried.
    pub(super) news: usize,
    /// What is left to others for a moment.
    pub(super) young: usize,
    /// There is more than was looked at.
    pub(super) more: bool,
}

impl PollResult {
    pub(super) fn add(&mut self, other: Self) {
        self.news += other.news;
        self.young += other.young;
        self.more |= other.more;
    }
}

/// A row of a look.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct DueRow {
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
    #[serde(default)]
    known_by: Option<String>,
}

/// What a row is to this process.
enum RowState {
    News,
    Known,
    Young,
}

/// Pages that one look has left to the next.
pub(super) type Rest = Option<RowPages>;
pub(super) struct RowPages(Pages<DueRow>);

/// Looks for turns. `rest` is where the look before has ended, and where this one ends.
pub(super) async fn turns(
    engine: &Arc<Engine>,
    look: &PollRequest<'_>,
    rest: &mut Rest,
) -> Result<PollResult, StoreError> {
    let (now, until) = (engine.now(), engine.now() + look.ahead);
    let statement = queries::DUE_TURNS.statement().bind("@now", now).bind("@until", until);
    let statement = |page: u32| with_slots(statement.clone(), look, page);
    let first = rows(engine, look, statement(PAGE))?;
    follow(engine, look, first, || rows(engine, look, statement(NEXT_PAGE)), rest).await
}

/// Looks for activities that somebody here can run: whole, so that a claim is one request.
pub(super) async fn work(
    engine: &Arc<Engine>,
    look: &PollRequest<'_>,
    tags: &Tags,
    rest: &mut Rest,
) -> Result<PollResult, StoreError> {
    let now = engine.now();
    let room = (engine.discovery.fleet.idle_workers().max(1) * WORK_EACH).min(MOST_WORK);
    let (documents, full) = whole(engine, look, tags, queries::DUE_ACTIVITIES.statement(), room).await?;
    let (view, mut found) = (engine.discovery.fleet.view(), PollResult { more: full, ..PollResult::default() });
    for document in documents {
        found.note(offer_activity(engine, look, &view, &DueRow::of(&document), Some(document)));
    }
    debug!(?found, queue = "activity", "polled");
    if found.news > 0 || !full {
        return Ok(found);
    }
    let statement = || with_tags(with_slots(queries::DUE_ACTIVITY_ROWS.statement(), look, NEXT_PAGE), tags);
    let all = || rows(engine, look, statement().bind("@until", now));
    follow(engine, look, all()?, all, rest).await
}

/// Looks for activities that others have too many of, from the end that they come to last. Those who help are many and see the
/// same: each takes what falls to it, and where that is nothing, some of it.
pub(super) async fn help(engine: &Arc<Engine>, look: &PollRequest<'_>, tags: &Tags) -> Result<PollResult, StoreError> {
    let fleet = &engine.discovery.fleet;
    let (view, share) = (fleet.view(), fleet.workers().max(1) * WORK_EACH);
    let (documents, full) = whole(engine, look, tags, queries::LAST_ACTIVITIES.statement(), HELP).await?;
    let mut found = PollResult { more: full, ..PollResult::default() };
    let (position, members) = view.place_of_worker(fleet.me(), tags);
    let (mine, mut others): (Vec<_>, Vec<_>) =
        documents.into_iter().partition(|document| falls_to(&document.id, members) == position);
    engine.config.randomness().shuffle(&mut others);
    for document in mine.into_iter().chain(others) {
        let is_mine = falls_to(&document.id, members) == position;
        if found.news >= HELP_EACH || (!is_mine && found.news >= share) {
            found.more = true;
            break;
        }
        found.note(offer_activity(engine, look, &view, &DueRow::of(&document), Some(document)));
    }
    debug!(?found, queue = "help", "polled");
    Ok(found)
}

/// Which of so many an activity falls to.
fn falls_to(id: &DocumentId, members: usize) -> usize {
    // Activities that were scheduled together have numbers that follow each other.
    let number = ActivityDocument::identity(id).map_or_else(|| id.as_str().len() as u64, |(_, activity)| activity);
    usize::try_from(number % members.max(1) as u64).unwrap_or(0)
}

/// Activities with all that a claim needs: so many, and whether there are more.
async fn whole(
    engine: &Arc<Engine>,
    look: &PollRequest<'_>,
    tags: &Tags,
    statement: Statement,
    room: usize,
) -> Result<(Vec<ActivityDocument>, bool), StoreError> {
    let page = u32::try_from(room).unwrap_or(PAGE);
    let statement = with_tags(with_slots(statement, look, page), tags).bind("@until", engine.now());
    let (documents, full) = rows::<ActivityDocument>(engine, look, statement)?.at_least(room).await?;
    Ok((documents.readable(), full))
}

/// Looks for everything that somebody here can take, in both queues, by one question.
pub(super) async fn everything(
    engine: &Arc<Engine>,
    look: &PollRequest<'_>,
    tags: &Tags,
) -> Result<PollResult, StoreError> {
    let (now, until) = (engine.now(), engine.now() + look.ahead);
    let statement = with_tags(queries::DUE.statement(), tags).bind("@now", now).bind("@until", until);
    let mut pages = rows(engine, look, in_manner(statement, look, PAGE * 2))?;
    let (page, full) = pages.at_least(PAGE as usize * 2).await?;
    Ok(take_in(engine, look, page, full))
}

fn in_manner(statement: Statement, look: &PollRequest<'_>, page: u32) -> Statement {
    let statement = statement.in_pages_of(NonZeroU32::new(page).unwrap_or(NonZeroU32::MIN)).in_background();
    if look.eager || !look.named.is_empty() {
        return statement.latest_committed();
    }
    statement
}

fn with_slots(statement: Statement, look: &PollRequest<'_>, page: u32) -> Statement {
    let (from, to) = look.slots.bounds();
    in_manner(statement, look, page).bind("@from", from).bind("@to", to)
}

fn with_tags(statement: Statement, tags: &Tags) -> Statement {
    statement.bind("@any", tags.any).bind("@untagged", tags.untagged).bind_list("@tags", &tags.tags)
}

fn rows<T: DeserializeOwned + Send + 'static>(
    engine: &Engine,
    look: &PollRequest<'_>,
    statement: Statement,
) -> Result<Pages<T>, StoreError> {
    match look.range {
        Some(range) => engine.store.range_pages(range, statement, QueryTimeout::PerPage(QUERY_TIME)),
        None => engine.store.container_pages(statement, engine.deadline()),
    }
}

/// Takes in the first page, and those behind it as long as they hold nothing for us: from where the look before has ended, or
/// in larger ones from the start.
async fn follow(
    engine: &Arc<Engine>,
    look: &PollRequest<'_>,
    mut first: Pages<DueRow>,
    larger: impl FnOnce() -> Result<Pages<DueRow>, StoreError>,
    rest: &mut Rest,
) -> Result<PollResult, StoreError> {
    let (page, full) = first.at_least(PAGE as usize).await?;
    let mut found = take_in(engine, look, page, full);
    if found.news > 0 || !full {
        *rest = if full { rest.take() } else { None };
        return Ok(found);
    }
    let mut pages = match rest.take() {
        Some(RowPages(pages)) => pages,
        None => larger()?,
    };
    for _ in 1..MOST_PAGES {
        let (page, full) = pages.at_least(NEXT_PAGE as usize).await?;
        found.add(take_in(engine, look, page, full));
        if !full {
            found.more = false;
            return Ok(found);
        }
        if found.news > 0 {
            break;
        }
    }
    *rest = Some(RowPages(pages));
    Ok(found)
}

/// Offers the rows of a page.
fn take_in(engine: &Arc<Engine>, look: &PollRequest<'_>, page: Rows<DueRow>, full: bool) -> PollResult {
    let (view, now) = (engine.discovery.fleet.view(), engine.now());
    let mut found = PollResult { more: full, ..PollResult::default() };
    let mut intents = false;
    let rows = page.len();
    for row in page.readable() {
        let standing = match row.kind.as_str() {
            kind::INTENT => {
                intents |= row.due <= now;
                RowState::Known
            }
            kind::ACTIVITY => offer_activity(engine, look, &view, &row, None),
            // A process that runs no turns keeps nothing of them.
            _ if !engine.discovery.fleet.takes_turns() => RowState::Known,
            _ => offer_turn(engine, look, &view, row),
        };
        found.note(standing);
    }
    if intents {
        outbox::reconcile_soon(engine, look.range);
    }
    debug!(rows, ?found, "polled");
    found
}

impl PollResult {
    fn note(&mut self, standing: RowState) {
        match standing {
            RowState::News => self.news += 1,
            RowState::Young => self.young += 1,
            RowState::Known => {}
        }
    }
}

impl DueRow {
    fn of(document: &ActivityDocument) -> Self {
        Self {
            id: document.id.clone(),
            instance_id: document.instance_id.clone(),
            kind: kind::ACTIVITY.to_owned(),
            due: document.due,
            seq: document.seq.clone(),
            starts: false,
            tag: document.tag.clone(),
            session_id: document.session_id.clone(),
            known_by: document.known_by.clone(),
        }
    }

    /// Whether it is to be left to others for now; `ours` are the slots that this process, `me`, looks after.
    fn is_young(&self, look: &PollRequest<'_>, view: &View, me: &str, ours: SlotRange, now: Millis) -> bool {
        let slot = Slot::of(&self.instance_id);
        // What this process knew of and has forgotten is known to nobody.
        if look.eager || look.named.contains(&slot) || self.known_by.as_deref() == Some(me) {
            return false;
        }
        let known = self.known_by.as_ref().is_some_and(|by| view.takes(by, &self.kind, self.tag.as_deref()));
        if ours.contains(slot) && !known {
            return false;
        }
        // What was put off or taken before is as old as its time says, and what is new as its place in the queue.
        let made: Millis = self.seq.get(..15).and_then(|made| made.parse().ok()).unwrap_or(0);
        self.due.max(made) + GRACE > now
    }
}

fn offer_turn(engine: &Engine, look: &PollRequest<'_>, view: &View, row: DueRow) -> RowState {
    let (discovery, now) = (&engine.discovery, engine.now());
    let known = discovery.turns.peek(&row.instance_id, |candidate| candidate.knows(&row.id));
    if look.eager && known == Some(true) && row.due <= now {
        discovery.waits_no_longer(&row.instance_id);
    }
    // What a turn of ours has, or had a moment ago, is not news.
    let news = known != Some(true) && !discovery.recent.is_taken(&row.instance_id, &row.id, now);
    if !news {
        return RowState::Known;
    }
    if row.is_young(look, view, discovery.fleet.me(), view.turns, now) {
        return RowState::Young;
    }
    // A half-finished instance may have no message; the claim looks after it.
    let seq = if row.kind == kind::INSTANCE { String::new() } else { row.seq };
    let due = row.due;
    let ends = MessageDocument::is_completion(&row.id);
    let mut candidate = TurnCandidate { ends, ..TurnCandidate::new(row.instance_id, row.starts) };
    candidate.seen.push((row.id, due));
    discovery.offer_turn(candidate, seq, due, false);
    // Another message for an instance that waits for its turn is no reason to look no further.
    if due > now || known.is_some() {
        return RowState::Known;
    }
    RowState::News
}

fn offer_activity(
    engine: &Engine,
    look: &PollRequest<'_>,
    view: &View,
    row: &DueRow,
    document: Option<ActivityDocument>,
) -> RowState {
    let (discovery, now): (&Discovery, Millis) = (&engine.discovery, engine.now());
    if row.due > now || discovery.work.is_busy(&row.seq, now) {
        return RowState::Known;
    }
    let known = discovery.work.peek(&row.seq, |_| ()).is_some();
    if !known && row.is_young(look, view, discovery.fleet.me(), view.work, now) {
        return RowState::Young;
    }
    let (key, seq, due) = (row.seq.clone(), row.seq.clone(), row.due);
    let document = document.unwrap_or_else(|| row.unread());
    if let Some(session) = &row.session_id {
        discovery.held.seen_free(session, now);
    }
    // The row says that nobody holds it now, whatever an attempt before has met.
    let offer =
        Offer { key, candidate: ActivityCandidate::new(document, &discovery.local_instances), seq, due, urgent: true };
    discovery.work.offer(offer, now, |_, _| ());
    if known {
        return RowState::Known;
    }
    RowState::News
}

impl DueRow {
    /// What is known of an activity before its document is read.
    fn unread(&self) -> ActivityDocument {
        ActivityDocument {
            id: self.id.clone(),
            instance_id: self.instance_id.clone(),
            kind: kind::ACTIVITY.to_owned(),
            due: self.due,
            seq: self.seq.clone(),
            attempts: 0,
            session_id: self.session_id.clone(),
            tag: self.tag.clone(),
            slot: None,
            known_by: self.known_by.clone(),
            lock: None,
            item: None,
            etag: None,
            unknown: Unknown::default(),
        }
    }
}
