//! A history as what happened: things that began and ended, in the order in which they began.

use duroxide::{build_child_instance_id, Event, EventKind};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Entry {
    /// The event with which it began.
    pub event: u64,
    /// `activity`, `timer`, `child`, `event`, `orchestration` …
    pub what: &'static str,
    /// Of what: an orchestration, an activity, an event, a key.
    pub name: String,
    /// Of a timer, when it fires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due: Option<u64>,
    /// Of a child, its instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Which attempt at the same it is: how often an activity of this name and input has failed before, and one.
    pub attempt: u32,
    /// When it began, in milliseconds since 1970.
    pub at: u64,
    /// When it ended, if it has.
    pub ended: Option<u64>,
    /// `done`, `failed`, `cancelled`, `waits` or, for what has no end, nothing.
    pub state: &'static str,
    /// What it was given.
    pub input: Option<String>,
    /// What it has returned, or why it failed.
    pub output: Option<String>,
}

/// The things that a history tells of.
pub fn entries(events: &[Event]) -> Vec<Entry> {
    let mut entries: BTreeMap<u64, Entry> = BTreeMap::new();
    // How often activities have failed, by name and input.
    let mut failures: HashMap<(String, Option<String>), u32> = HashMap::new();
    for event in events {
        if let Some((state, output)) = end(&event.kind) {
            let begun = event.source_event_id.or_else(|| waiting(&entries, &event.kind));
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

/// What an event from outside is for, which does not say so: of those that wait for its name, the one that began first.
fn waiting(entries: &BTreeMap<u64, Entry>, kind: &EventKind) -> Option<u64> {
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

/// How something ended, where an event tells of that.
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
        // It came before anybody waited for it.
        EventKind::ExternalEvent { name, data } | EventKind::QueueEventDelivered { name, data } => {
            entry("arrived", name, "", Some(data))
        }
        EventKind::CustomStatusUpdated { status } => entry("status", status.as_deref().unwrap_or(""), "", None),
        EventKind::KeyValueSet { key, value, .. } => entry("value", key, "", Some(value)),
        EventKind::KeyValueCleared { key } => entry("value cleared", key, "", None),
        EventKind::KeyValuesCleared => entry("values cleared", "", "", None),
        // What comes without a beginning, or with a version of duroxide that this one does not know.
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
    fn what_has_begun_and_ended_is_one_thing() {
        let history = [
            event(2, None, 100, activity("A")),
            event(3, None, 110, activity("B")),
            event(4, Some(2), 150, EventKind::ActivityCompleted { result: "out".to_owned() }),
            event(5, None, 160, EventKind::OrchestrationCompleted { output: "end".to_owned() }),
        ];
        let told: Vec<_> =
            entries(&history).into_iter().map(|e| (e.what, e.name, e.at, e.ended, e.state, e.output)).collect();
        assert_eq!(
            told,
            [
                ("activity", "A".to_owned(), 100, Some(150), "done", Some("out".to_owned())),
                ("activity", "B".to_owned(), 110, None, "waits", None),
                ("completed", String::new(), 160, None, "", Some("end".to_owned())),
            ]
        );
    }

    #[test]
    fn an_event_from_outside_ends_the_oldest_wait_for_its_name() {
        let waits = |id, name: &str| event(id, None, 100, EventKind::ExternalSubscribed { name: name.to_owned() });
        let comes = |id, name: &str| {
            event(id, None, 150, EventKind::ExternalEvent { name: name.to_owned(), data: format!("data {id}") })
        };
        let history = [waits(2, "a"), waits(3, "b"), waits(4, "b"), comes(5, "b"), comes(6, "c")];
        let told: Vec<_> = entries(&history).into_iter().map(|e| (e.event, e.what, e.state, e.output)).collect();
        let expected = [
            (2, "event", "waits", None),
            (3, "event", "done", Some("data 5".to_owned())),
            (4, "event", "waits", None),
            (6, "arrived", "", None),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn what_is_tried_again_after_it_failed_is_counted() {
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
        let told: Vec<_> = entries(&history).into_iter().map(|e| (e.event, e.attempt, e.state)).collect();
        assert_eq!(told, [(2, 1, "failed"), (4, 2, "failed"), (5, 1, "waits"), (7, 3, "waits")]);
    }

    #[test]
    fn an_end_without_a_beginning_is_told_all_the_same() {
        let history = [event(4, Some(2), 150, EventKind::ActivityCompleted { result: "out".to_owned() })];
        assert_eq!(entries(&history).len(), 1);
    }
}
