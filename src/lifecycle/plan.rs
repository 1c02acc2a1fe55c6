//! The plan of a deletion: all of a set of instances, or none, also when the process dies in the middle.
//!
//! 1. The coordinator, the first of the set that is there, gets a mark that names the plan. The other instances are
//!    listed in parts in its partition, each written before the instances of the part are marked too. The write of a
//!    part also counts it in the coordinator's mark, so that a plan may grow until it is decided. A mark takes the
//!    lock off: a turn under way is lost by the ordinary fence. Nothing is deleted yet.
//! 2. The coordinator's mark is *decided*: one write. From here on the whole set does not exist for anybody who looks. Or it
//!    is *given up*, by one write too: from here on nobody can decide.
//! 3. Part by part, the instances of a decided plan are erased, and those of one that was given up lose their marks. The
//!    batch that deletes a part says in the coordinator's mark how far that has come. The coordinator itself comes last.
//!
//! A plan is decided where its coordinator's document says so, and nowhere else. The coordinator's mark is the first that is
//! put on and the last that goes. So a mark whose coordinator knows nothing of the plan is one that came too late.
//!
//! Where two plans meet, the one that began first goes on, and the other one waits for it or is given up and tried
//! again. So of two plans that wait for each other one always comes to its end.
//!
//! Crash points: before the decision, whoever meets a mark gives the plan up once the coordinator's `due` says that nobody
//! has gone on with it for long; after it, whoever meets a mark goes on at 3. The coordinator carries `due`, so that a poll
//! meets it.

use super::{
    erase::{self, Decision},
    recovery, Documents, Incarnation,
};
use crate::{
    cosmos::{BatchOutcome, Deadline, Freshness, StoreError, Versioned, WriteOutcome},
    engine::Engine,
    model::{Deleting, DeletionState, InstanceDocument, Millis, Operation, Partition, PlanDocument},
    turn::{instance_id, staging},
};
use azure_core::http::Etag;
use duroxide::providers::DeleteInstanceResult;
use futures::{stream, StreamExt};
use std::{
    collections::{HashMap, HashSet},
    future::Future,
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;
use tracing::{debug, info, warn};

/// How long a plan that is not decided has, since somebody last went on with it, before others give it up.
pub(crate) const UNDO_AFTER: Millis = 30_000;
/// How long it has before another deletion of the same instance gives it up, and how often that one looks.
const GIVE_WAY_AFTER: Millis = 3_000;
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Clocks that are right differ by less.
pub(super) const SKEW: Millis = 5_000;
/// How often whoever goes on with a plan says so.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// When a poll meets the mark of an instance other than the coordinator, should nobody have met it before. It is late, since
/// thousands of marks would otherwise fill the polls of a plan that is under way.
const LATE: Millis = 10 * 60 * 1_000;
/// Instances that are kept in memory as they were seen or marked, for a set: what one more costs is a read.
pub(super) const KNOWN: usize = 2_000;
/// Instances that are marked, or unmarked, at once.
pub(super) const CONCURRENCY: usize = 32;
/// A dispatcher that meets a large deletion goes on with it for so long, and leaves the rest for the next look.
pub(super) const RECOVERY_TIME: Duration = Duration::from_secs(2);

/// How long somebody goes on with a deletion that may be large. Each of its steps has a deadline of its own.
#[derive(Clone, Copy)]
pub(crate) enum RecoveryBudget {
    Endless,
    Until(Deadline),
}

impl RecoveryBudget {
    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Until(deadline) if deadline.passed())
    }
}

/// Why an instance could not be marked.
pub(super) enum Unmarked {
    Running,
    /// It is not the one that was found: it has ended again since, or is another one of the same name.
    Changed,
    /// Another deletion that covers one of the same instances came first.
    Overtaken,
    Store(StoreError),
}

/// What must be true of the instances of a set when they are marked.
#[derive(Clone, Default)]
pub(super) struct DeletionTerms {
    /// Instances that run are marked, too.
    pub(super) force: bool,
    /// Messages of the instances that nobody can deliver are given up.
    pub(super) gives_up_messages: bool,
    /// Instances that somebody has chosen: each must be the one that was chosen.
    pub(super) chosen: HashMap<String, ChosenInstance>,
}

/// How an instance was when it was chosen.
#[derive(Clone)]
pub(super) struct ChosenInstance {
    pub(super) incarnation: Incarnation,
    /// It was chosen since it had ended: it must not run again, even where others may.
    pub(super) has_ended: bool,
}

impl ChosenInstance {
    fn still_holds(&self, document: &InstanceDocument) -> bool {
        let is_same = self.incarnation.incarnation == document.incarnation;
        is_same && (!self.has_ended || (document.has_ended() && self.incarnation.epoch == document.epoch))
    }
}

impl DeletionTerms {
    /// Whether an instance that is found now is another one than was seen before, or, where it must have ended, has
    /// done so again since.
    fn is_changed(&self, seen: &Incarnation, document: &InstanceDocument) -> bool {
        let now = Incarnation::of(document);
        seen.incarnation != now.incarnation || (!self.force && *seen != now)
    }

    /// Whether a document is no instance of the set. With force, the first turn of an instance goes, too.
    fn overlooks(&self, document: &InstanceDocument, now: Millis) -> bool {
        document.has_only_deferred(now) || (!self.force && !document.exists())
    }

    /// Why this instance can't be marked.
    fn refuse(&self, id: &str, document: &InstanceDocument) -> Option<Unmarked> {
        if !self.force && document.is_running() {
            return Some(Unmarked::Running);
        }
        let chosen = self.chosen.get(id)?;
        (!chosen.still_holds(document)).then_some(Unmarked::Changed)
    }

    /// These instances must be the ones that a query has shown.
    pub(super) fn expect(&mut self, incarnations: impl IntoIterator<Item = (String, Incarnation)>) {
        for (id, incarnation) in incarnations {
            self.chosen.entry(id).or_insert(ChosenInstance { incarnation, has_ended: false });
        }
    }
}

impl From<serde_json::Error> for Unmarked {
    fn from(error: serde_json::Error) -> Self {
        Self::Store(error.into())
    }
}

impl From<StoreError> for Unmarked {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// What was done of a plan.
#[derive(Default)]
pub(super) struct PlanOutcome {
    pub(super) result: DeleteInstanceResult,
    /// Why it has stopped before the end.
    pub(super) trouble: Option<StoreError>,
}

/// Who goes on with a plan whose state stands.
pub(super) enum PlanDriver<'a> {
    /// The one who has decided it, who knows these instances from marking them.
    Decider(&'a Documents),
    Helper,
}

/// A plan that this process makes.
pub(super) struct DeletionPlan<'a> {
    engine: &'a Arc<Engine>,
    mark: Deleting,
    partition: Partition,
    terms: DeletionTerms,
    /// When the coordinator last heard of us.
    beat: Instant,
    /// The other instances, as our marks have left them.
    marked: Documents,
    /// The instances that our marks are on, and how many they are with their executions and events.
    members: HashSet<Partition>,
    covered: DeleteInstanceResult,
}

impl<'a> DeletionPlan<'a> {
    /// Fingerprints the coordinator of a plan for `ids`, the first that is there; none where none of them is. The others are
    /// returned with it. An error says which instance it was.
    pub(super) async fn begin(
        engine: &'a Arc<Engine>,
        ids: &[String],
        seen: &Documents,
        terms: &DeletionTerms,
    ) -> Result<Option<(Self, Vec<String>)>, (String, Unmarked)> {
        let (name, before) = (engine.new_token(), engine.sequencer.next());
        let look = |(at, id): (usize, String)| async move {
            let found = find(engine, &id, terms).await;
            (at, id, found)
        };
        // The first one is there nearly always: the others are looked at only where it is not.
        let mut ids_in_order = ids.iter().cloned().enumerate();
        let first = stream::iter(ids_in_order.next()).then(look);
        let mut looking = std::pin::pin!(first.chain(stream::iter(ids_in_order).map(look).buffered(CONCURRENCY)));
        while let Some((at, id, found)) = looking.next().await {
            let failed = |unmarked: Unmarked| (id.clone(), unmarked);
            let Some(found) = found.map_err(|e| failed(e.into()))? else { continue };
            if seen.get(&id).is_some_and(|seen| terms.is_changed(&Incarnation::of(&seen.document), &found.document)) {
                return Err(failed(Unmarked::Changed));
            }
            let others = &ids[at + 1..];
            let mark = Deleting {
                plan: name.clone(),
                coordinator: id.clone(),
                before: before.clone(),
                committed_after: None,
                committed_by: None,
                last_written: None,
                state: DeletionState::Open,
                parts: 0,
                part: 0,
                recovered_by_others: false,
            };
            let Ok(partition) = Partition::instance(&id) else { continue };
            let marked = mark_one(engine, &id, &mark, terms, UNDO_AFTER, Some(found)).await.map_err(failed)?;
            if let Some(coordinator) = marked {
                let (beat, marked, covered) = (Instant::now(), Documents::new(), DeleteInstanceResult::default());
                let (terms, members) = (terms.clone(), HashSet::new());
                let mut plan = Self { engine, mark, partition, terms, beat, marked, members, covered };
                plan.cover(&coordinator.document);
                return Ok(Some((plan, others.to_vec())));
            }
        }
        Ok(None)
    }

    /// Lists and marks more instances, some of which were seen; which could not be marked. Stops at the part where that
    /// happens.
    pub(super) async fn mark_others(
        &mut self,
        others: &[String],
        mut seen: Documents,
    ) -> Result<Vec<(String, Unmarked)>, Unmarked> {
        for members in others.chunks(PlanDocument::MEMBERS) {
            let part = PlanDocument::new(self.partition.clone(), &self.mark.plan, self.mark.parts, members.to_vec());
            self.mark.parts += 1;
            // An attempt whose answer was lost may have written it already.
            self.say(&[Operation::upsert(&part)?]).await?;
            for chunk in members.chunks(CONCURRENCY) {
                let failures = self.mark_chunk(chunk, &mut seen).await;
                if !failures.is_empty() {
                    return Ok(failures);
                }
                self.go_on().await?;
            }
        }
        Ok(Vec::new())
    }

    async fn mark_chunk(&mut self, chunk: &[String], seen: &mut Documents) -> Vec<(String, Unmarked)> {
        let (engine, terms, mark) = (self.engine, &self.terms, &Deleting { parts: 0, ..self.mark.clone() });
        let chunk: Vec<_> = chunk.iter().map(|id| (id.clone(), seen.remove(id))).collect();
        let marking = stream::iter(chunk)
            .map(|(id, seen)| async move {
                let marked = mark_one(engine, &id, mark, terms, LATE, seen).await;
                (id, marked)
            })
            .buffer_unordered(CONCURRENCY);
        let marked: Vec<_> = marking.collect().await;
        let mut failures = Vec::new();
        for (id, marked) in marked {
            match marked {
                Ok(Some(found)) => {
                    self.cover(&found.document);
                    self.marked.extend(Some((id, found)).filter(|_| self.marked.len() < KNOWN));
                }
                Ok(None) => {}
                Err(unmarked) => failures.push((id, unmarked)),
            }
        }
        failures
    }

    /// Counts an instance that carries our mark.
    fn cover(&mut self, document: &InstanceDocument) {
        self.members.insert(document.instance_id.clone());
        self.covered.instances_deleted += u64::from(document.exists());
        self.covered.executions_deleted += document.totals.executions;
        self.covered.events_deleted += document.totals.events;
    }

    /// Whether an instance carries our mark.
    pub(super) fn has(&self, instance: &Partition) -> bool {
        self.members.contains(instance)
    }

    /// Takes descendants into the plan that were found after their parents were marked.
    pub(super) fn expect(&mut self, incarnations: impl IntoIterator<Item = (String, Incarnation)>) {
        self.terms.expect(incarnations);
    }

    /// Says now and then that this plan is not dead.
    pub(super) async fn go_on(&mut self) -> Result<(), Unmarked> {
        if self.beat.elapsed() < BEAT_EVERY {
            return Ok(());
        }
        self.say(&[]).await
    }

    /// Does something that may take long, and says meanwhile that this plan is not dead.
    pub(super) async fn while_it_goes_on<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Unmarked> {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                () = tokio::time::sleep(BEAT_EVERY) => match self.go_on().await {
                    Err(Unmarked::Store(error)) if error.is_retryable() => {
                        debug!(%error, "the decision tells whether the plan still holds");
                    }
                    gone_on => gone_on?,
                },
            }
        }
    }

    /// Postpones the moment from which on others give the plan up, together with `operations`.
    async fn say(&mut self, operations: &[Operation]) -> Result<(), Unmarked> {
        let (due, parts) = (self.engine.now() + UNDO_AFTER, self.mark.parts);
        self.beat = Instant::now();
        self.rewrite(operations, |document, mark| {
            document.due = Some(due);
            mark.parts = parts;
        })
        .await
    }

    /// The write that decides: from here on the set does not exist.
    pub(super) async fn decide(&self) -> Result<(), Unmarked> {
        let (due, before) = (self.engine.now() + staging::TAKEOVER_AFTER, self.engine.sequencer.next());
        self.rewrite(&[], |document, mark| {
            mark.state = DeletionState::Committed;
            mark.before.clone_from(&before);
            mark.committed_after = Some(document.written_at);
            document.due = Some(due);
        })
        .await
    }

    async fn rewrite(
        &self,
        operations: &[Operation],
        change: impl Fn(&mut InstanceDocument, &mut Deleting),
    ) -> Result<(), Unmarked> {
        let Self { engine, mark, partition, .. } = self;
        if rewrite(engine, partition, &mark.plan, &[DeletionState::Open], operations, change).await? {
            return Ok(());
        }
        // Committed by us, with the answer lost.
        let theirs = recovery::coordinators_mark(engine, mark, engine.deadline()).await?;
        if theirs.is_some_and(|theirs| theirs.mark.state == DeletionState::Committed) {
            return Ok(());
        }
        Err(Unmarked::Overtaken)
    }

    /// Erases everything that the plan covers, once it is decided. All of it counts as deleted by the call that has
    /// decided, although others may have erased a part of it.
    pub(super) async fn finish(&self) -> PlanOutcome {
        let carrier = PlanDriver::Decider(&self.marked);
        let mut carried =
            carry_out(self.engine, &self.partition, &self.mark.plan, carrier, RecoveryBudget::Endless).await;
        if carried.trouble.is_none() {
            let queue_messages_deleted = carried.result.queue_messages_deleted;
            carried.result = DeleteInstanceResult { queue_messages_deleted, ..self.covered.clone() };
        }
        carried
    }

    /// Takes the marks off again. Best effort: whoever meets one goes on with that. A plan that was decided after all, with the
    /// answer lost, is finished instead.
    pub(super) async fn undo(&self, others: &[String]) {
        let Self { engine, mark, partition, .. } = self;
        let undone = async {
            let ours = give_up(engine, partition, &mark.plan).await?;
            let theirs = recovery::coordinators_mark(engine, mark, engine.deadline()).await?;
            let decided = theirs.is_some_and(|theirs| theirs.mark.state == DeletionState::Committed);
            let carried = carry_out(engine, partition, &mark.plan, PlanDriver::Helper, RecoveryBudget::Endless).await;
            if let Some(error) = carried.trouble {
                return Err(error);
            }
            if !ours && !decided {
                // Another one gave it up, and may have looked at an instance before we marked it.
                unmark_all(engine, others, &mark.plan).await;
            }
            Ok::<(), StoreError>(())
        };
        if let Err(error) = undone.await {
            info!(instance_id = mark.coordinator, %error, "the fingerprints of a deletion are seen to later");
        }
    }
}

/// An instance that is there.
async fn find(
    engine: &Engine,
    id: &str,
    terms: &DeletionTerms,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let Ok(partition) = Partition::instance(id) else { return Ok(None) };
    let found = engine.read_latest(&partition, engine.deadline()).await?;
    Ok(found.filter(|found| !terms.overlooks(&found.document, engine.now())))
}

/// Whether an instance that was seen can be marked, if it is still as it was.
fn is_plain(document: &InstanceDocument, force: bool) -> bool {
    let is_at_rest = document.exists() && document.deleting.is_none() && document.roll_forward.is_none();
    is_at_rest && (force || !document.is_running())
}

/// Fingerprints one instance, which may have been seen: as it is from then on, none where it is not there. One that was seen
/// must be the same.
async fn mark_one(
    engine: &Arc<Engine>,
    id: &str,
    mark: &Deleting,
    terms: &DeletionTerms,
    schedule_recovery: Millis,
    seen: Option<Versioned<InstanceDocument>>,
) -> Result<Option<Versioned<InstanceDocument>>, Unmarked> {
    let Ok(partition) = Partition::instance(id) else { return Ok(None) };
    let deadline = engine.deadline();
    let expected = seen.as_ref().map(|seen| Incarnation::of(&seen.document));
    let mut seen = seen.filter(|seen| is_plain(&seen.document, terms.force));
    loop {
        let found = match seen.take() {
            Some(seen) => Some(seen),
            None => engine.read_latest(&partition, deadline).await?,
        };
        let Some(Versioned { mut document, etag }) = found else { return Ok(None) };
        if document.deleting.as_ref().is_some_and(|theirs| theirs.plan == mark.plan) {
            return Ok(Some(Versioned { document, etag }));
        }
        if document.deleting.is_none() && terms.overlooks(&document, engine.now()) {
            return Ok(None);
        }
        if let Some(theirs) = &document.deleting {
            let old = if mark.began_before(theirs) { 0 } else { GIVE_WAY_AFTER };
            if !recovery::recover(engine, &document, old, deadline).await? {
                tokio::time::sleep(LOOK_EVERY).await;
            }
            continue;
        }
        if document.roll_forward.is_some() {
            match staging::roll_forward(engine, &partition, deadline).await {
                Ok(_) => continue,
                // Nobody can apply the rest of that turn: the instance goes with what is left of it.
                Err(error) if terms.force && !error.is_retryable() => {
                    warn!(instance_id = id, %error, "deleting an instance whose last turn can't be applied");
                }
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(unmarked) = terms.refuse(id, &document) {
            return Err(unmarked);
        }
        if expected.as_ref().is_some_and(|expected| terms.is_changed(expected, &document)) {
            return Err(Unmarked::Changed);
        }
        put_on(engine, &mut document, mark, schedule_recovery);
        let written = engine.store.replace(&partition, &instance_id(), &document, Some(&etag), deadline).await;
        engine.cache.forget(&partition);
        if let WriteOutcome::Done(etag) = written? {
            return Ok(Some(Versioned { document, etag }));
        }
    }
}

/// The mark takes the lock off, so that a turn under way can neither commit nor stage nor renew. Should the plan be given up,
/// that turn was no attempt.
fn put_on(engine: &Engine, document: &mut InstanceDocument, mark: &Deleting, schedule_recovery: Millis) {
    let now = engine.now();
    if document.locked_until(now).is_some() {
        document.claims.pop();
    }
    document.lock = None;
    document.mark(mark);
    // Nothing else tells of a message that is in the document.
    let soon = if document.inlined.is_some() { UNDO_AFTER } else { Millis::MAX };
    document.due = Some(now + schedule_recovery.min(soon));
}

/// Changes the coordinator's mark of a plan that has one of `verdicts`, together with `operations`; `false` where there is
/// none.
async fn rewrite(
    engine: &Engine,
    partition: &Partition,
    plan: &str,
    verdicts: &[DeletionState],
    operations: &[Operation],
    change: impl Fn(&mut InstanceDocument, &mut Deleting),
) -> Result<bool, StoreError> {
    let deadline = engine.deadline();
    loop {
        let found = engine.read_latest(partition, deadline).await?;
        let Some(Versioned { mut document, etag }) = found else { return Ok(false) };
        document.keep_service_times();
        let Some(mut mark) = document.deleting.take().filter(|mark| mark.plan == plan) else { return Ok(false) };
        if !verdicts.contains(&mark.state) {
            return Ok(false);
        }
        change(&mut document, &mut mark);
        document.deleting = Some(mark);
        let written = write_with(engine, partition, &document, &etag, operations, deadline).await?;
        engine.cache.forget(partition);
        if let Some(written) = written {
            return Ok(written);
        }
    }
}

/// Writes an instance's document that is as `etag` says, together with `operations`; `false` where one of those can't be
/// done, none where the document has changed.
async fn write_with(
    engine: &Engine,
    partition: &Partition,
    document: &InstanceDocument,
    etag: &Etag,
    operations: &[Operation],
    deadline: Deadline,
) -> Result<Option<bool>, StoreError> {
    if operations.is_empty() {
        let written = engine.store.replace(partition, &instance_id(), document, Some(etag), deadline).await?;
        return Ok(matches!(written, WriteOutcome::Done(_)).then_some(true));
    }
    let mut whole = vec![Operation::replace(instance_id(), document, Some(etag))?];
    whole.extend_from_slice(operations);
    match engine.store.batch(partition, &whole, deadline).await? {
        BatchOutcome::Committed(_) => Ok(Some(true)),
        BatchOutcome::RolledBack(back) => Ok((back.index > 0).then_some(false)),
    }
}

/// From here on nobody can decide any more; `false` where somebody has done so, or given it up before.
pub(super) async fn give_up(engine: &Engine, partition: &Partition, plan: &str) -> Result<bool, StoreError> {
    let due = engine.now() + staging::TAKEOVER_AFTER;
    rewrite(engine, partition, plan, &[DeletionState::Open], &[], |document, mark| {
        mark.state = DeletionState::Aborted;
        document.due = Some(due);
    })
    .await
}

/// Goes on with a plan whose state stands: part by part, the coordinator last. A part of which an instance can't be read
/// stays, with the coordinator, and the other parts go.
pub(super) async fn carry_out(
    engine: &Arc<Engine>,
    partition: &Partition,
    plan: &str,
    carrier: PlanDriver<'_>,
    patience: RecoveryBudget,
) -> PlanOutcome {
    let mut carried = PlanOutcome::default();
    let mut from = 0;
    loop {
        match carry_on(engine, partition, plan, &carrier, patience, (&mut carried, &mut from)).await {
            Ok(true) if !patience.is_over() => {}
            Ok(_) => return carried,
            Err(error) => {
                carried.trouble.get_or_insert(error);
                return carried;
            }
        }
    }
}

/// One part, the first from a number on, or at last the coordinator; whether there is more.
async fn carry_on(
    engine: &Arc<Engine>,
    partition: &Partition,
    plan: &str,
    carrier: &PlanDriver<'_>,
    patience: RecoveryBudget,
    (carried, from): (&mut PlanOutcome, &mut usize),
) -> Result<bool, StoreError> {
    let Some(found) = engine.read_latest(partition, engine.deadline()).await? else { return Ok(false) };
    let written_at = found.document.written_at;
    let Some(mark) = found.document.deleting.filter(|mark| mark.plan == plan) else { return Ok(false) };
    let next = next_part(engine, partition, &mark, *from).await?;
    if next.is_none() && carried.trouble.is_some() {
        return Ok(false);
    }
    let members = next.as_ref().map_or_else(|| vec![mark.coordinator.clone()], |(_, part)| part.members.clone());
    match mark.state {
        DeletionState::Open => return Ok(false),
        DeletionState::Committed => {
            let nothing = Documents::new();
            let marked = match carrier {
                PlanDriver::Decider(marked) => *marked,
                PlanDriver::Helper if help(engine, partition, &mark).await? => &nothing,
                // It was finished since.
                PlanDriver::Helper => return Ok(false),
            };
            let decision = Decision::new(mark.clone(), written_at);
            let erased = erase::erase_all(engine, &members, &decision, marked, patience).await;
            super::add(&mut carried.result, erased.result);
            match (erased.trouble, &next) {
                (Some(error), Some((number, _))) if error.is_of_one_partition() => {
                    carried.trouble.get_or_insert(error);
                    *from = number + 1;
                    return Ok(true);
                }
                (Some(error), _) => return Err(error),
                (None, _) => {}
            }
            if !erased.whole {
                return Ok(true);
            }
        }
        DeletionState::Aborted if next.is_some() => unmark_all(engine, &members, plan).await,
        DeletionState::Aborted => {
            unmark(engine, &mark.coordinator, plan).await?;
        }
    }
    let Some((number, part)) = next else { return Ok(false) };
    debug!(coordinator = %partition, part = number, of = mark.parts, "dealt with a part of a deletion");
    let due = engine.now() + staging::TAKEOVER_AFTER;
    // Where another one was faster, the next look tells.
    rewrite(engine, partition, plan, &[mark.state], &[Operation::delete(part.id, None)], |document, mark| {
        // A part before it may be left.
        if mark.part == number {
            mark.part += 1;
        }
        document.due = Some(due);
    })
    .await?;
    Ok(true)
}

/// Says that somebody else than the decider erases instances of a plan, before anything is done; `false` where the plan is
/// finished.
pub(super) async fn help(engine: &Engine, coordinator: &Partition, mark: &Deleting) -> Result<bool, StoreError> {
    if mark.recovered_by_others {
        return Ok(true);
    }
    rewrite(engine, coordinator, &mark.plan, &[DeletionState::Committed], &[], |_, mark| {
        mark.recovered_by_others = true
    })
    .await
}

/// Whether somebody else than the decider of a plan may have erased instances of it.
pub(super) async fn is_helped(engine: &Engine, mark: &Deleting) -> Result<bool, StoreError> {
    let theirs = recovery::coordinators_mark(engine, mark, engine.deadline()).await?;
    Ok(theirs.is_none_or(|theirs| theirs.mark.recovered_by_others))
}

/// The first part from a number on that is still there.
async fn next_part(
    engine: &Engine,
    partition: &Partition,
    mark: &Deleting,
    from: usize,
) -> Result<Option<(usize, PlanDocument)>, StoreError> {
    for part in mark.part.max(from)..mark.parts {
        let id = PlanDocument::document_id(&mark.plan, part);
        let found = engine.store.read(partition, &id, Freshness::Authoritative, engine.deadline()).await?;
        if let Some(Versioned { document, .. }) = found {
            return Ok(Some((part, document)));
        }
    }
    Ok(None)
}

/// Takes the marks of a plan that was given up off. Best effort: whoever meets one takes it off.
async fn unmark_all(engine: &Arc<Engine>, ids: &[String], plan: &str) {
    let unmarking = stream::iter(ids.to_vec()).map(|id| async move {
        if let Err(error) = unmark(engine, &id, plan).await {
            info!(instance_id = id, %error, "a mark of deletion is taken off later");
        }
    });
    unmarking.buffer_unordered(CONCURRENCY).collect::<Vec<()>>().await;
}

pub(super) async fn unmark(engine: &Arc<Engine>, id: &str, plan: &str) -> Result<(), StoreError> {
    let Ok(partition) = Partition::instance(id) else { return Ok(()) };
    let deadline = engine.deadline();
    loop {
        let found = engine.read_latest(&partition, deadline).await?;
        let Some(Versioned { mut document, etag }) = found else { return Ok(()) };
        let ours = |mark: &Deleting| mark.plan == plan && mark.state != DeletionState::Committed;
        if !document.deleting.as_ref().is_some_and(ours) {
            return Ok(());
        }
        document.unmark();
        document.due = document.needs_recovery().then(|| engine.now());
        let written = engine.store.replace(&partition, &instance_id(), &document, Some(&etag), deadline).await?;
        engine.cache.forget(&partition);
        if let WriteOutcome::Done(_) = written {
            engine.discovery.turn_returned(&partition, 0);
            return Ok(());
        }
    }
}
