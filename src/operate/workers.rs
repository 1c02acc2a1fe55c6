//! Who is there.

use crate::{
    cosmos::{queries, StoreError},
    engine::Engine,
    model::{Capabilities, MemberDocument, Millis, SlotRange, Tags, Versions},
};
use serde::Serialize;
use std::sync::Arc;

/// A process that looks for work.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Member {
    /// Its name: a new one for each process.
    pub name: String,
    /// When the service last heard of it, in milliseconds since 1970, by the service's clock.
    pub last_heard: u64,
    /// Whether that was less than a minute ago, by this process's clock. What is dead is forgotten after an hour.
    pub alive: bool,
    /// What it takes of the turns, while a dispatcher there waits for one.
    pub turns: Option<TurnCapabilities>,
    /// What it takes of the activities, while a worker there waits for one.
    pub activities: Option<ActivityCapabilities>,
    /// As whom its workers own sessions.
    pub session_owners: Vec<String>,
}

/// What a member takes of the turns.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct TurnCapabilities {
    /// The slots that it looks after.
    pub slots: SlotRange,
    /// The versions of duroxide that it runs, from and to; none where it runs all.
    pub versions: Option<(String, String)>,
}

/// What a member takes of the activities.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ActivityCapabilities {
    /// The slots that it looks after.
    pub slots: SlotRange,
    /// All of them, whatever their tag.
    pub any: bool,
    /// Those without a tag.
    pub untagged: bool,
    /// Those with one of these tags.
    pub tags: Vec<String>,
}

/// The members, and which of them are alive at this time.
pub(super) async fn members(engine: &Arc<Engine>, now: Millis) -> Result<Vec<Member>, StoreError> {
    let statement = queries::MEMBERS.statement();
    let pages = engine.store.partition_pages(&MemberDocument::partition(), statement, engine.deadline())?;
    let found: Vec<MemberDocument> = pages.collect().await?.readable();
    let mut members: Vec<Member> = found.into_iter().map(|member| Member::of(member, now)).collect();
    members.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(members)
}

impl Member {
    fn of(document: MemberDocument, now: Millis) -> Self {
        /// A member renews its document every 20 s.
        const LIFE: Millis = 60_000;
        let MemberDocument { member: name, turns, work, owners, renewed, .. } = document;
        let turns = turns.map(|Capabilities { need: Versions(versions), slots }| TurnCapabilities { slots, versions });
        let activities = work.map(|Capabilities { need: Tags { any, untagged, tags }, slots }| {
            let tags = tags.into_iter().collect();
            ActivityCapabilities { slots, any, untagged, tags }
        });
        let last_heard = renewed * 1_000;
        let alive = now.saturating_sub(last_heard) < LIFE;
        Self { name, last_heard, alive, turns, activities, session_owners: owners }
    }
}
