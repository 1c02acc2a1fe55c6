//! The waiting messages and activities, and their age.

use crate::{
    cosmos::{queries, Rows, StoreError},
    engine::Engine,
    model::{MessageDocument, Millis, Partition},
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, sync::Arc};

/// The content of the queues.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct QueueReport {
    /// Messages for orchestrations.
    pub turns: TurnQueue,
    /// Activities, by tag and session.
    pub activities: Vec<ActivityQueue>,
    /// Whether the queues hold more than was counted. The figures then describe the oldest thousand.
    pub capped: bool,
    /// Messages and activities that this version can't read. No other figure contains them. The log and a
    /// [doctor](crate::operate::Doctor) name them.
    pub unreadable: usize,
}

/// Messages for orchestrations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct TurnQueue {
    /// Messages that are due, including those of turns in progress.
    pub waiting: usize,
    /// The time since which the oldest of them has waited, in milliseconds since 1970.
    pub oldest: Option<u64>,
    /// The instance that the oldest message is for.
    pub oldest_instance: Option<String>,
    /// Timers and messages that are not due yet.
    pub later: usize,
    /// Messages for instances without a start.
    pub deferred: usize,
}

/// Activities of one tag and session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ActivityQueue {
    /// The tag of the activities.
    pub tag: Option<String>,
    /// The session of the activities.
    pub session: Option<String>,
    /// Activities that no worker has claimed.
    pub waiting: usize,
    /// The time since which the oldest of them has waited, in milliseconds since 1970.
    pub oldest: Option<u64>,
    /// The instance of the oldest activity.
    pub oldest_instance: Option<String>,
    /// Activities that a worker runs.
    pub running: usize,
    /// The highest number of attempts of one of them.
    pub most_attempts: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MessageRow {
    instance_id: Partition,
    due: Millis,
    #[serde(default)]
    created_at: Millis,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ActivityRow {
    instance_id: Partition,
    due: Millis,
    #[serde(default)]
    tag: Option<String>,
    #[serde(default)]
    session_id: Option<String>,
    #[serde(default)]
    attempts: u32,
    #[serde(default)]
    until: Option<Millis>,
}

pub(crate) async fn report(engine: &Arc<Engine>) -> Result<QueueReport, StoreError> {
    let (now, deadline) = (engine.now(), engine.deadline());
    let messages = queries::QUEUED_MESSAGES.statement();
    let messages: Rows<MessageRow> = engine.store.query_container(messages, deadline).await?;
    let activities: Rows<ActivityRow> =
        engine.store.query_container(queries::QUEUED_ACTIVITIES.statement(), deadline).await?;
    let capped = messages.len().max(activities.len()) >= queries::MOST_QUEUED;
    let (messages, unreadable_messages) = messages.into_parts();
    let (activities, unreadable_activities) = activities.into_parts();
    let unreadable = unreadable_messages.len() + unreadable_activities.len();
    Ok(QueueReport {
        turns: turn_queue(&messages, now),
        activities: activity_queues(&activities, now),
        capped,
        unreadable,
    })
}

fn turn_queue(messages: &[MessageRow], now: Millis) -> TurnQueue {
    let mut queue = TurnQueue::default();
    for message in messages {
        if message.due == MessageDocument::DEFERRED {
            queue.deferred += 1;
        } else if message.due > now {
            queue.later += 1;
        } else {
            queue.waiting += 1;
            keep_oldest(
                &mut queue.oldest,
                &mut queue.oldest_instance,
                message.due.max(message.created_at),
                &message.instance_id,
            );
        }
    }
    queue
}

fn activity_queues(rows: &[ActivityRow], now: Millis) -> Vec<ActivityQueue> {
    let mut queues: BTreeMap<(Option<&str>, Option<&str>), ActivityQueue> = BTreeMap::new();
    for row in rows {
        let queue = queues.entry((row.tag.as_deref(), row.session_id.as_deref())).or_default();
        queue.most_attempts = queue.most_attempts.max(row.attempts);
        if row.until.is_some_and(|until| until > now) {
            queue.running += 1;
        } else {
            queue.waiting += 1;
            keep_oldest(&mut queue.oldest, &mut queue.oldest_instance, row.due, &row.instance_id);
        }
    }
    let named = |((tag, session), queue): ((Option<&str>, Option<&str>), ActivityQueue)| ActivityQueue {
        tag: tag.map(ToOwned::to_owned),
        session: session.map(ToOwned::to_owned),
        ..queue
    };
    queues.into_iter().map(named).collect()
}

/// Keeps the oldest entry and its instance.
fn keep_oldest(oldest: &mut Option<u64>, whose: &mut Option<String>, since: Millis, instance: &Partition) {
    if oldest.is_none_or(|oldest| since < oldest) {
        (*oldest, *whose) = (Some(since), instance.instance_id().map(ToOwned::to_owned));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(name: &str) -> Partition {
        Partition::instance(name).unwrap()
    }

    #[test]
    fn timers_and_deferred_messages_are_not_waiting() {
        let message = |name: &str, due, created_at| MessageRow { instance_id: instance(name), due, created_at };
        let messages = [
            message("old", 100, 100),
            message("young", 900, 900),
            message("timer", 2_000, 1),
            message("deferred", MessageDocument::DEFERRED, 1),
        ];
        let queue = turn_queue(&messages, 1_000);
        assert_eq!((queue.waiting, queue.later, queue.deferred), (2, 1, 1));
        assert_eq!((queue.oldest, queue.oldest_instance.as_deref()), (Some(100), Some("old")));
    }

    #[test]
    fn activities_are_grouped_by_tag_and_session_and_counted_as_waiting_or_running() {
        let row = |name: &str, due, tag: Option<&str>, session: Option<&str>, until| ActivityRow {
            instance_id: instance(name),
            due,
            tag: tag.map(ToOwned::to_owned),
            session_id: session.map(ToOwned::to_owned),
            attempts: 1,
            until,
        };
        let activities = [
            row("a", 100, None, None, None),
            row("b", 2_000, None, None, Some(2_000)),
            row("c", 900, None, None, Some(900)),
            row("d", 50, Some("gpu"), Some("s"), None),
        ];
        let queues = activity_queues(&activities, 1_000);
        let told: Vec<_> = queues
            .iter()
            .map(|q| (q.tag.as_deref(), q.session.as_deref(), q.waiting, q.running, q.oldest_instance.as_deref()))
            .collect();
        assert_eq!(told, [(None, None, 2, 1, Some("a")), (Some("gpu"), Some("s"), 1, 0, Some("d"))]);
    }
}
