//! What the provider must know of duroxide's work items: whose they are, and when they become visible.

use super::Millis;
use duroxide::providers::WorkItem;

/// The instance whose queue an orchestrator message goes to; nothing for an activity.
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

/// A message that can begin an instance or an execution.
pub(crate) fn starts(item: &WorkItem) -> bool {
    matches!(item, WorkItem::StartOrchestration { .. } | WorkItem::ContinueAsNew { .. })
}

/// When a message becomes visible if nobody delays it.
pub(crate) fn visible_at(item: &WorkItem, now: Millis) -> Millis {
    match item {
        WorkItem::TimerFired { fire_at_ms, .. } => *fire_at_ms,
        _ => now,
    }
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
