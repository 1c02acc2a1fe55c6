//! Properties of duroxide's work items and events: the target instance, the visibility time, the scheduled activity.

use super::{clock::storable, Millis};
use duroxide::{providers::WorkItem, Event, EventKind};

/// The id of the event that poisons an execution, whatever events precede it.
pub(crate) const POISON_EVENT_ID: u64 = 99_999;

/// The instance whose queue receives a message. An activity has none.
pub(crate) fn target(item: &WorkItem) -> Option<&str> {
    match item {
        WorkItem::StartOrchestration { instance, .. }
        | WorkItem::ActivityCompleted { instance, .. }
        | WorkItem::ActivityFailed { instance, .. }
        | WorkItem::TimerFired { instance, .. }
        | WorkItem::ExternalRaised { instance, .. }
        | WorkItem::QueueMessage { instance, .. }
        | WorkItem::CancelInstance { instance, .. }
        | WorkItem::ContinueAsNew { instance, .. } => Some(instance),
        WorkItem::SubOrchCompleted { parent_instance, .. } | WorkItem::SubOrchFailed { parent_instance, .. } => {
            Some(parent_instance)
        }
        WorkItem::ActivityExecute { .. } => None,
    }
}

/// Whether a message can start an instance or an execution.
pub(crate) fn starts(item: &WorkItem) -> bool {
    matches!(item, WorkItem::StartOrchestration { .. } | WorkItem::ContinueAsNew { .. })
}

/// The time when a message becomes visible, unless the caller delays it.
pub(crate) fn visible_at(item: &WorkItem, now: Millis) -> Millis {
    match item {
        WorkItem::TimerFired { fire_at_ms, .. } => storable(*fire_at_ms),
        _ => now,
    }
}

/// The activity that an event schedules.
pub(crate) fn scheduled(instance: &str, execution: u64, event: &Event) -> Option<WorkItem> {
    let EventKind::ActivityScheduled { name, input, session_id, tag } = &event.kind else { return None };
    Some(WorkItem::ActivityExecute {
        instance: instance.to_owned(),
        execution_id: execution,
        id: event.event_id,
        name: name.clone(),
        input: input.clone(),
        session_id: session_id.clone(),
        tag: tag.clone(),
    })
}

/// A short name for logs and error messages.
pub(crate) fn kind(item: &WorkItem) -> &'static str {
    match item {
        WorkItem::StartOrchestration { .. } => "StartOrchestration",
        WorkItem::ActivityExecute { .. } => "ActivityExecute",
        WorkItem::ActivityCompleted { .. } => "ActivityCompleted",
        WorkItem::ActivityFailed { .. } => "ActivityFailed",
        WorkItem::TimerFired { .. } => "TimerFired",
        WorkItem::ExternalRaised { .. } => "ExternalRaised",
        WorkItem::SubOrchCompleted { .. } => "SubOrchCompleted",
        WorkItem::SubOrchFailed { .. } => "SubOrchFailed",
        WorkItem::CancelInstance { .. } => "CancelInstance",
        WorkItem::ContinueAsNew { .. } => "ContinueAsNew",
        WorkItem::QueueMessage { .. } => "QueueMessage",
    }
}

/// The name and version of the orchestration that a message starts.
pub(crate) fn started(item: &WorkItem) -> Option<(&str, Option<&str>)> {
    match item {
        WorkItem::StartOrchestration { orchestration, version, .. }
        | WorkItem::ContinueAsNew { orchestration, version, .. } => Some((orchestration, version.as_deref())),
        _ => None,
    }
}
