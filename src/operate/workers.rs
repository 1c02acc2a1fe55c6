//! The workers of a container.

use crate::{
    cosmos::{queries, StoreError},
    engine::Engine,
    model::{Capabilities, MemberDocument, Millis, SlotRange, Tags, Versions},
};
use serde::Serialize;
use std::sync::Arc;

/// A worker: a process that looks for work.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Member {
    /// The name of the worker. Each process has a new one.
    pub name: String,
    /// The time of its last heartbeat, in milliseconds since 1970, by Cosmos DB's clock.
    pub last_heard: u64,
    /// Whether the last heartbeat is less than a minute ago, by this process's clock. A dead worker is removed after an
    /// hour.
    pub alive: bool,
    /// The turns that it takes. Present while one of its dispatchers waits for turns.
    pub turns: Option<TurnCapabilities>,
    /// The activities that it takes. Present while one of its dispatchers waits for activities.
    pub activities: Option<ActivityCapabilities>,
    /// The owner ids under which it holds sessions.
    pub session_owners: Vec<String>,
}

/// The turns that a worker takes.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct TurnCapabilities {
    /// The slots that the worker polls first.
    pub slots: SlotRange,
    /// The lowest and the highest version of duroxide that it runs. `None` stands for all versions.
    pub versions: Option<(String, String)>,
}

/// The activities that a worker takes.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ActivityCapabilities {
    /// The slots that the worker polls first.
    pub slots: SlotRange,
    /// Whether it takes all activities, whatever their tag.
    pub any: bool,
    /// Whether it takes activities without a tag.
    pub untagged: bool,
    /// It takes activities with one of these tags.
    pub tags: Vec<String>,
}

/// The workers of the container. `now` decides which of them are alive.
pub(crate) async fn members(engine: &Arc<Engine>, now: Millis) -> Result<Vec<Member>, StoreError> {
    let statement = queries::MEMBERS.statement();
    let pages = engine.store.partition_pages(&MemberDocument::partition(), statement, engine.deadline())?;
    let found: Vec<MemberDocument> = pages.collect().await?.readable();
    let mut members: Vec<Member> = found.into_iter().map(|member| Member::of(member, now)).collect();
    members.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(members)
}

impl Member {
    fn of(document: MemberDocument, now: Millis) -> Self {
        /// A worker renews its document every 20 s.
        const ALIVE_FOR: Millis = 60_000;
        let MemberDocument { member: name, turns, activities, owners, renewed, .. } = document;
        let turns = turns.map(|Capabilities { need: Versions(versions), slots }| TurnCapabilities { slots, versions });
        let activities = activities.map(|Capabilities { need: Tags { any, untagged, tags }, slots }| {
            let tags = tags.into_iter().collect();
            ActivityCapabilities { slots, any, untagged, tags }
        });
        let last_heard = renewed * 1_000;
        let alive = now.saturating_sub(last_heard) < ALIVE_FOR;
        Self { name, last_heard, alive, turns, activities, session_owners: owners }
    }
}
