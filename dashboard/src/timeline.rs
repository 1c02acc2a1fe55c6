//! A history as a timeline. Each entry joins the event that begins an operation with the event that ends it.

use duroxide::{build_child_instance_id, Event, EventKind};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// One entry of a timeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Entry {
    /// The id of the event that began it.
    pub event: u64,
    /// The type: `activity`, `timer`, `child`, `event`, `queue`, `started`, `completed` …
    pub what: &'static str,
    /// The name of the orchestration, activity, event, queue or key.
    pub name: String,
    /// The time at which a timer fires, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due: Option<u64>,
    /// The id of the child instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// The number of the attempt: one more than the earlier failures of activities with this name and input.
    pub attempt: u32,
    /// The time at which it began, in milliseconds since 1970.
    pub at: u64,
    /// The time at which it ended.
    pub ended: Option<u64>,
    /// `done`, `failed`, `cancelled` or `waits`; empty for an entry without an end, such as a custom status.
    pub state: &'static str,
    /// The input.
    pub input: Option<String>,
    /// The result, the error, or the reason of the cancellation.
    pub output: Option<String>,
}

/// The entries of a history, in the order in which they began.
pub fn entries(events: &[Event]) -> Vec<Entry> {
    let mut entries: BTreeMap<u64, Entry> = BTreeMap::new();
    // The number of failures of activities, by name and input.
    let mut failures: HashMap<(String, Option<String>), u32> = HashMap::new();
    for event in events {
        if let Some((state, output)) = end(&event.kind) {
            let begun = event.source_event_id.or_else(|| oldest_wait(&entries, &event.kind));
            if let Some(begun) = begun.and_then(|begun| entries.get_mut(&begun)) {
                (begun.ended, begun.state, begun.output) = (Some(event.timestamp_ms), state, output);
                if begun.what == ACTIVITY && state == FAILED {
                    *failures.entry((begun.name.clone(), begun.input.clone())).or_default() += 1;
                }
                continue;
            }
        }
        let mut entry = begin(event);
        if entry.what == ACTIVITY {
            entry.attempt += failures.get(&(entry.name.clone(), entry.input.clone())).copied().unwrap_or(0);
        }
        entries.insert(event.event_id, entry);
    }
    entries.into_values().collect()
}

/// The wait that an external event ends. The event does not name it: it is the oldest wait for the name of the event.
fn oldest_wait(entries: &BTreeMap<u64, Entry>, kind: &EventKind) -> Option<u64> {
    let (what, name) = match kind {
        EventKind::ExternalEvent { name, .. } => (EVENT, name),
        EventKind::QueueEventDelivered { name, .. } => (QUEUE, name),
        _ => return None,
    };
    let waits = |entry: &&Entry| entry.what == what && entry.state == WAITS && entry.name == *name;
    entries.values().find(waits).map(|entry| entry.event)
}

const ACTIVITY: &str = "activity";
const FAILED: &str = "failed";
const EVENT: &str = "event";
const QUEUE: &str = "queue";
const WAITS: &str = "waits";

/// The state and the output of an entry that an event ends; `None` if the event ends no entry.
fn end(kind: &EventKind) -> Option<(&'static str, Option<String>)> {
    Some(match kind {
        EventKind::ActivityCompleted { result } | EventKind::SubOrchestrationCompleted { result } => {
            ("done", Some(result.clone()))
        }
        EventKind::ActivityFailed { details } | EventKind::SubOrchestrationFailed { details } => {
            (FAILED, Some(details.display_message()))
        }
        EventKind::TimerFired { .. } => ("done", None),
        EventKind::ExternalEvent { data, .. } | EventKind::QueueEventDelivered { data, .. } => {
            ("done", Some(data.clone()))
        }
        EventKind::ActivityCancelRequested { reason }
        | EventKind::SubOrchestrationCancelRequested { reason }
        | EventKind::ExternalSubscribedCancelled { reason }
        | EventKind::QueueSubscriptionCancelled { reason } => ("cancelled", Some(reason.clone())),
        _ => return None,
    })
}

/// The entry that an event begins.
fn begin(event: &Event) -> Entry {
    let entry = |what: &'static str, name: &str, state: &'static str, input: Option<&String>| Entry {
        event: event.event_id,
        what,
        name: name.to_owned(),
        due: None,
        instance: None,
        attempt: 1,
        at: event.timestamp_ms,
        ended: None,
        state,
        input: input.cloned(),
        output: None,
    };
    match &event.kind {
        EventKind::OrchestrationStarted { name, input, .. } => entry("started", name, "", Some(input)),
        EventKind::OrchestrationCompleted { output } => {
            Entry { output: Some(output.clone()), ..entry("completed", "", "", None) }
        }
        EventKind::OrchestrationFailed { details } => {
            Entry { output: Some(details.display_message()), ..entry("failed", "", "", None) }
        }
        EventKind::OrchestrationContinuedAsNew { input } => entry("continued", "", "", Some(input)),
        EventKind::OrchestrationCancelRequested { reason } => entry("asked to stop", reason, "", None),
        EventKind::OrchestrationChained { name, input, instance } => {
            Entry { instance: Some(instance.clone()), ..entry("chained", name, "", Some(input)) }
        }
        EventKind::ActivityScheduled { name, input, .. } => entry(ACTIVITY, name, WAITS, Some(input)),
        EventKind::SubOrchestrationScheduled { name, input, instance } => {
            let child = build_child_instance_id(&event.instance_id, instance);
            Entry { instance: Some(child), ..entry("child", name, WAITS, Some(input)) }
        }
        EventKind::TimerCreated { fire_at_ms } => Entry { due: Some(*fire_at_ms), ..entry("timer", "", WAITS, None) },
        EventKind::ExternalSubscribed { name } => entry(EVENT, name, WAITS, None),
        EventKind::QueueSubscribed { name } => entry(QUEUE, name, WAITS, None),
        // The event arrived before the orchestration waited for it.
        EventKind::ExternalEvent { name, data } | EventKind::QueueEventDelivered { name, data } => {
            entry("arrived", name, "", Some(data))
        }
        EventKind::CustomStatusUpdated { status } => entry("status", status.as_deref().unwrap_or(""), "", None),
        EventKind::KeyValueSet { key, value, .. } => entry("value", key, "", Some(value)),
        EventKind::KeyValueCleared { key } => entry("value cleared", key, "", None),
        EventKind::KeyValuesCleared => entry("values cleared", "", "", None),
        // An end without a beginning, or an event of a newer version of duroxide.
        other => entry("other", &format!("{other:?}").chars().take(60).collect::<String>(), "", None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: u64, source: Option<u64>, at: u64, kind: EventKind) -> Event {
        let mut event = Event::with_event_id(id, "i", 1, source, kind);
        event.timestamp_ms = at;
        event
    }

    fn activity(name: &str) -> EventKind {
        EventKind::ActivityScheduled { name: name.to_owned(), input: "in".to_owned(), session_id: None, tag: None }
    }

    #[test]
    fn a_beginning_and_its_end_are_one_entry() {
        let history = [
            event(2, None, 100, activity("A")),
            event(3, None, 110, activity("B")),
            event(4, Some(2), 150, EventKind::ActivityCompleted { result: "out".to_owned() }),
            event(5, None, 160, EventKind::OrchestrationCompleted { output: "end".to_owned() }),
        ];
        let found: Vec<_> =
            entries(&history).into_iter().map(|e| (e.what, e.name, e.at, e.ended, e.state, e.output)).collect();
        assert_eq!(
            found,
            [
                ("activity", "A".to_owned(), 100, Some(150), "done", Some("out".to_owned())),
                ("activity", "B".to_owned(), 110, None, "waits", None),
                ("completed", String::new(), 160, None, "", Some("end".to_owned())),
            ]
        );
    }

    #[test]
    fn an_external_event_ends_the_oldest_wait_for_its_name() {
        let waits = |id, name: &str| event(id, None, 100, EventKind::ExternalSubscribed { name: name.to_owned() });
        let arrives = |id, name: &str| {
            event(id, None, 150, EventKind::ExternalEvent { name: name.to_owned(), data: format!("data {id}") })
        };
        let history = [waits(2, "a"), waits(3, "b"), waits(4, "b"), arrives(5, "b"), arrives(6, "c")];
        let found: Vec<_> = entries(&history).into_iter().map(|e| (e.event, e.what, e.state, e.output)).collect();
        let expected = [
            (2, "event", "waits", None),
            (3, "event", "done", Some("data 5".to_owned())),
            (4, "event", "waits", None),
            (6, "arrived", "", None),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn attempts_after_a_failure_are_counted() {
        let failed = || {
            let kind = duroxide::AppErrorKind::ActivityFailed;
            let details = duroxide::ErrorDetails::Application { kind, message: "no".to_owned(), retryable: true };
            EventKind::ActivityFailed { details }
        };
        let history = [
            event(2, None, 100, activity("A")),
            event(3, Some(2), 110, failed()),
            event(4, None, 120, activity("A")),
            event(5, None, 120, activity("B")),
            event(6, Some(4), 130, failed()),
            event(7, None, 140, activity("A")),
        ];
        let found: Vec<_> = entries(&history).into_iter().map(|e| (e.event, e.attempt, e.state)).collect();
        assert_eq!(found, [(2, 1, "failed"), (4, 2, "failed"), (5, 1, "waits"), (7, 3, "waits")]);
    }

    #[test]
    fn an_end_without_a_beginning_is_an_entry() {
        let history = [event(4, Some(2), 150, EventKind::ActivityCompleted { result: "out".to_owned() })];
        assert_eq!(entries(&history).len(), 1);
    }
}
