//! Membership: one small document for each process that looks for work in the container.
//!
//! There is no invariant, because membership decides nothing. Two workers that cover the same slots meet at the claim,
//! whose ETag decides. Slots that no worker covers are polled by all. So no worker can lose a lease, and nothing passes
//! from one worker to another.
//!
//! A worker renews its document while a dispatcher of it waits, and lists the documents of all workers more often. The
//! `_ts` of Cosmos DB, compared with that of the latest renewal of any worker, tells which workers are alive. So clocks
//! do not matter.
//!
//! Crash points: a dead process is listed for [`LIFE`] more. Its wake-ups are lost, and polls find the work in its
//! slots. A worker that lists deletes documents that are an hour old, because time to live may be switched off.

use super::leases::{Asker, Shares};
use crate::model::MemberPosition;
use crate::{
    cosmos::{queries, Deadline, StoreError},
    engine::Engine,
    model::{kind, Capabilities, MemberDocument, Need, Partition, Slot, SlotRange, Tags, Versions, WakeupDocument},
};
use duroxide::providers::{DispatcherCapabilityFilter, SessionFetchConfig, TagFilter};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};
use tokio::time::Instant;
use tracing::{debug, warn};

/// How often a member renews its document, and reads those of all.
const RENEWAL: Duration = Duration::from_secs(20);
pub(super) const LIST: Duration = Duration::from_secs(8);
/// A member that has not renewed for so long, in seconds of the service, is taken for dead.
const LIFE: u64 = 50;
/// Documents that are so much older than our own are deleted by whoever lists, in seconds.
const LITTER: u64 = 3_600;
/// A queue that nobody has fetched from for so long is none of this process's.
const INTEREST: Duration = Duration::from_secs(60);
/// Of so many owners of sessions a member tells.
const MOST_OWNERS: usize = 64;

/// Who is there, as far as this process knows.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// Those that are alive, in the order of their names, without this process.
    pub(super) others: Vec<MemberDocument>,
    /// What this process looks after.
    pub(super) turns: SlotRange,
    pub(super) work: SlotRange,
}

impl Default for View {
    /// Before its first list a process looks after everything.
    fn default() -> Self {
        Self { others: Vec::new(), turns: SlotRange::ALL, work: SlotRange::ALL }
    }
}

impl View {
    /// Whether another process of this name is alive.
    pub(super) fn is_alive(&self, member: &str) -> bool {
        self.others.iter().any(|other| other.member == member)
    }

    /// Whether another process of this name is alive and takes what is of this kind by itself.
    pub(super) fn takes(&self, member: &str, of_kind: &str, tag: Option<&str>) -> bool {
        self.others.iter().filter(|other| other.member == member).any(|other| match of_kind {
            kind::ACTIVITY => other.activities.as_ref().is_some_and(|register| register.need.run(tag)),
            _ => other.turns.is_some(),
        })
    }

    /// The others that run turns pinned to this version, those that look after the slot first.
    pub(super) fn runners(&self, slot: Slot, pinned: Option<&semver::Version>) -> Vec<&MemberDocument> {
        self.ordered(|member| {
            let register = member.turns.as_ref().filter(|register| register.need.run(pinned))?;
            Some(register.slots.contains(slot))
        })
    }

    /// The others that run activities with this tag, those that look after the slot first.
    pub(super) fn workers(&self, slot: Slot, tag: Option<&str>) -> Vec<&MemberDocument> {
        self.ordered(|member| {
            let register = member.activities.as_ref().filter(|register| register.need.run(tag))?;
            Some(register.slots.contains(slot))
        })
    }

    /// Where this process, `me`, stands among those that run the same activities, and how many they are.
    pub(super) fn place_of_worker(&self, me: &str, tags: &Tags) -> (usize, usize) {
        let peers =
            self.others.iter().filter(|other| other.activities.as_ref().is_some_and(|register| register.need == *tags));
        let (before, after): (Vec<_>, Vec<_>) = peers.partition(|other| other.member.as_str() < me);
        (before.len(), before.len() + after.len() + 1)
    }

    /// The one whose worker owns sessions as `owner`.
    pub(super) fn owner(&self, owner: &str) -> Option<&MemberDocument> {
        self.others.iter().find(|member| member.owners.iter().any(|id| id == owner))
    }

    /// Those that `looks_after` says something about; whose slot it is comes first, and of those who renewed last.
    fn ordered(&self, looks_after: impl Fn(&MemberDocument) -> Option<bool>) -> Vec<&MemberDocument> {
        let mut found: Vec<(bool, &MemberDocument)> =
            self.others.iter().filter_map(|member| Some((looks_after(member)?, member))).collect();
        found.sort_by_key(|(looks_after, member)| (!looks_after, u64::MAX - member.renewed));
        found.into_iter().map(|(_, member)| member).collect()
    }
}

/// What dispatchers of this process take of a queue, each kind of them, and when one last asked.
struct Needs<N>(Vec<(N, Instant)>);

impl<N> Default for Needs<N> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<N: Need> Needs<N> {
    /// One asks; whether none did so for a while.
    fn note(&mut self, need: N) -> bool {
        self.0.retain(|(_, asked)| asked.elapsed() < INTEREST);
        let now = Instant::now();
        match self.0.iter_mut().find(|(known, _)| *known == need) {
            Some((_, asked)) => *asked = now,
            None => {
                self.0.push((need, now));
                return true;
            }
        }
        false
    }

    /// What they take together, if there are any.
    fn all(&self) -> Option<N> {
        let lately = self.0.iter().filter(|(_, asked)| asked.elapsed() < INTEREST);
        lately.map(|(need, _)| need.clone()).reduce(N::and)
    }
}

/// What dispatchers of this process take.
#[derive(Default)]
struct LocalDemand {
    turns: Needs<Versions>,
    work: Needs<Tags>,
    owners: BTreeMap<String, Instant>,
    /// How many workers wait for an activity right now, and how many have at once.
    idle_workers: usize,
    workers: usize,
}

/// This process among the others.
pub(crate) struct Fleet {
    me: String,
    view: RwLock<Arc<View>>,
    listed: Mutex<Option<Instant>>,
    listing: tokio::sync::Mutex<()>,
    standing: Mutex<LocalDemand>,
    leases: Asker,
    /// This process's document as it was last written, and when; none where it has none.
    written: Mutex<Option<(MemberDocument, Instant)>>,
}

impl Fleet {
    pub(super) fn new(me: String) -> Self {
        Self {
            me,
            view: RwLock::default(),
            listed: Mutex::default(),
            listing: tokio::sync::Mutex::default(),
            standing: Mutex::default(),
            leases: Asker::default(),
            written: Mutex::default(),
        }
    }

    /// The name of this process.
    pub(super) fn me(&self) -> &str {
        &self.me
    }

    fn standing(&self) -> std::sync::MutexGuard<'_, LocalDemand> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn view(&self) -> Arc<View> {
        self.view.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A dispatcher here asks for turns; whether none did for a while, or for others.
    pub(super) fn asks_for_turns(&self, filter: Option<&DispatcherCapabilityFilter>) -> bool {
        self.standing().turns.note(Versions::from(filter))
    }

    /// A dispatcher here asks for activities; whether none did for a while, or for others.
    pub(super) fn asks_for_work(&self, tags: &TagFilter, session: Option<&SessionFetchConfig>) -> bool {
        let mut standing = self.standing();
        if let Some(session) = session {
            standing.owners.insert(session.owner_id.clone(), Instant::now());
        }
        standing.work.note(Tags::from(tags))
    }

    /// A worker begins to wait, until what is returned is dropped.
    pub(super) fn worker_waits(self: &Arc<Self>) -> IdleWorker {
        let mut standing = self.standing();
        standing.idle_workers += 1;
        standing.workers = standing.workers.max(standing.idle_workers);
        IdleWorker(self.clone())
    }

    /// How many workers wait for an activity right now.
    pub(super) fn idle_workers(&self) -> usize {
        self.standing().idle_workers
    }

    /// How many workers there are, as far as that is known: so many have waited at once.
    pub(super) fn workers(&self) -> usize {
        self.standing().workers
    }

    /// Whether dispatchers here take turns.
    pub(super) fn takes_turns(&self) -> bool {
        self.standing().turns.all().is_some()
    }

    /// Whether dispatchers here take activities with this tag.
    pub(super) fn takes_work(&self, tag: Option<&str>) -> bool {
        self.tags().is_some_and(|tags| tags.run(tag))
    }

    /// What dispatchers here take of activities, if any does.
    pub(super) fn tags(&self) -> Option<Tags> {
        self.standing().work.all()
    }

    /// The name to put on a message that this process takes itself.
    pub(super) fn turn_holder_name(&self) -> Option<String> {
        self.takes_turns().then(|| self.me.clone())
    }

    /// Reads who is there, and writes this process's own document where it is new, has changed or is due.
    pub(super) async fn renew(&self, engine: &Engine, deadline: Deadline) -> Result<(), StoreError> {
        if self.written().is_none() {
            let bell = WakeupDocument::new(&self.me, &self.me, engine.new_token());
            engine.store.upsert(&bell.instance_id, &bell.id, &bell, None, deadline).await?;
            self.write(engine, self.document(), deadline).await?;
        }
        // Who can't read who is there is there all the same.
        let listed = self.list(engine, deadline).await;
        let document = self.document();
        // Those who ring go by what is written there.
        let is_current = |(written, at): &(MemberDocument, Instant)| *written == document && at.elapsed() < RENEWAL;
        if !self.written().as_ref().is_some_and(is_current) {
            self.write(engine, document, deadline).await?;
        }
        listed
    }

    /// The bell is not there: others have taken this process for dead, after an hour of silence. It begins anew.
    pub(super) fn was_cleared_away(&self) -> bool {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        // A replica may not have a bell yet that was made a moment ago.
        written.take_if(|(_, at)| at.elapsed() > RENEWAL / 2).is_some()
    }

    /// Whether this process has a document.
    pub(super) fn is_member(&self) -> bool {
        self.written().is_some()
    }

    /// This process's document as it was last written, and when.
    fn written(&self) -> Option<(MemberDocument, Instant)> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn write(&self, engine: &Engine, document: MemberDocument, deadline: Deadline) -> Result<(), StoreError> {
        let partition = MemberDocument::partition();
        engine.store.upsert(&partition, &document.id, &document, None, deadline).await?;
        *self.written.lock().unwrap_or_else(PoisonError::into_inner) = Some((document, Instant::now()));
        Ok(())
    }

    /// This process's document, as it is now.
    fn document(&self) -> MemberDocument {
        let (view, mut standing) = (self.view(), self.standing());
        standing.owners.retain(|_, asked| asked.elapsed() < INTEREST);
        let mut document = MemberDocument::new(&self.me);
        document.turns = standing.turns.all().map(|need| Capabilities { need, slots: view.turns });
        document.activities = standing.work.all().map(|need| Capabilities { need, slots: view.work });
        document.owners = standing.owners.keys().take(MOST_OWNERS).cloned().collect();
        document
    }

    /// Reads who is there.
    pub(super) async fn list(&self, engine: &Engine, deadline: Deadline) -> Result<(), StoreError> {
        let statement = queries::MEMBERS.statement().in_background();
        let pages = engine.store.partition_pages(&MemberDocument::partition(), statement, deadline)?;
        let members: Vec<MemberDocument> = pages.collect().await?.readable();
        *self.listed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        // The service's own clock, as far as it is known here: when somebody last renewed.
        let present = members.iter().map(|member| member.renewed).max().unwrap_or(0);
        let (litter, members): (Vec<_>, Vec<_>) =
            members.into_iter().partition(|member| member.renewed + LITTER < present);
        self.clear_away(engine, litter);
        let mut others: Vec<MemberDocument> =
            members.into_iter().filter(|other| other.renewed + LIFE > present && other.member != self.me).collect();
        others.sort_by(|a, b| a.member.cmp(&b.member));
        let view = self.place(engine, others).await;
        debug!(others = view.others.len(), turns = ?view.turns, work = ?view.work, "listed the workers");
        crate::telemetry::members(view.others.len() + usize::from(self.written().is_some()));
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
        Ok(())
    }

    /// Which slots are ours, among these.
    async fn place(&self, engine: &Engine, others: Vec<MemberDocument>) -> View {
        let (versions, tags) = {
            let standing = self.standing();
            (standing.turns.all(), standing.work.all())
        };
        let place = |same: &dyn Fn(&MemberDocument) -> bool| {
            let peers = others.iter().filter(|other| same(other));
            let (position, members) = peers.fold((0, 1), |(position, members), other| {
                (position + usize::from(other.member < self.me), members + 1)
            });
            MemberPosition::new(position, members)
        };
        let turns =
            place(&|other| other.turns.as_ref().is_some_and(|register| Some(&register.need) == versions.as_ref()));
        let work =
            place(&|other| other.activities.as_ref().is_some_and(|register| Some(&register.need) == tags.as_ref()));
        let Shares { turns, work } = self.leases.shares(engine.config.own_leases(), turns, work).await;
        View { others, turns, work }
    }

    /// Reads who is there, unless that was a moment ago: for those who ring.
    pub(super) async fn list_if_older(
        &self,
        engine: &Engine,
        than: Duration,
        deadline: Deadline,
    ) -> Result<(), StoreError> {
        let is_young = || {
            let listed = *self.listed.lock().unwrap_or_else(PoisonError::into_inner);
            listed.is_some_and(|listed| listed.elapsed() < than)
        };
        if is_young() {
            return Ok(());
        }
        // One reads it for all.
        let _alone = self.listing.lock().await;
        if is_young() {
            return Ok(());
        }
        self.list(engine, deadline).await
    }

    /// A member whose bell is not there any more has left.
    pub(super) fn has_left(&self, member: &str) {
        let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
        let mut next = View::clone(&view);
        next.others.retain(|other| other.member != member);
        *view = Arc::new(next);
    }

    /// Deletes what processes have left that died long ago.
    fn clear_away(&self, engine: &Engine, litter: Vec<MemberDocument>) {
        for member in litter {
            let store = engine.store.clone();
            let deadline = engine.deadline();
            engine.spawn(async move {
                if let Err(error) = remove(&store, &member.member, deadline).await {
                    warn!(member = member.member, %error, "could not delete the documents of a dead worker, will retry");
                }
            });
        }
    }

    /// Deletes this process's document and bell: whoever lists next takes its slots over. Who is there should be told.
    pub(super) async fn leave(&self, engine: &Engine, deadline: Deadline) -> Result<bool, StoreError> {
        if self.written.lock().unwrap_or_else(PoisonError::into_inner).take().is_none() {
            return Ok(false);
        }
        remove(&engine.store, &self.me, deadline).await?;
        Ok(true)
    }
}

async fn remove(store: &crate::cosmos::Store, member: &str, deadline: Deadline) -> Result<(), StoreError> {
    let partition: Partition = MemberDocument::partition();
    // The bell first: who rings finds that nobody is there, and what is cut off here is cleared away with the document.
    store.delete(&WakeupDocument::partition(member), &WakeupDocument::document_id(), None, deadline).await?;
    store.delete(&partition, &MemberDocument::document_id(member), None, deadline).await?;
    Ok(())
}

/// A worker that waits for an activity.
pub(super) struct IdleWorker(Arc<Fleet>);

impl Drop for IdleWorker {
    fn drop(&mut self) {
        self.0.standing().idle_workers -= 1;
    }
}
