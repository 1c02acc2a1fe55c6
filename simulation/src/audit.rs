//! The audit: invariants of all stored documents.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use duroxide::providers::{ProviderAdmin, SystemMetrics};
use duroxide::{Client, Event, EventKind};
use duroxide_cosmos::operate::Reason;
use duroxide_cosmos::CosmosDBProvider;
use serde_json::Value;

use crate::oracle::Violation;
use crate::workload::ExpectedOutcome;

/// The id of the event that duroxide writes when it fails a poison message. It does not continue the other ids.
const POISON: u64 = 99_999;
/// The types of documents that exist only while an operation is in progress.
const TRANSIENT: [&str; 6] = ["message", "activity", "payload", "intent", "staged", "plan"];

/// The `due` of a deferred message: it waits for the start of its instance.
const DEFERRED: u64 = (1 << 53) - 1;

/// The invariant that operations leave no transient document.
const NOTHING_LEFT: &str = "no operation leaves a document behind";
/// The invariant that [`outcomes`] checks.
pub(crate) const OUTCOME: &str = "every orchestration ends as expected";
/// The invariant that a completion exists once.
const ONE_COMPLETION: &str = "each schedule has one completion";

/// All stored documents.
#[derive(Debug, Default)]
pub struct Snapshot {
    partitions: BTreeMap<String, Vec<Value>>,
    deleted: BTreeSet<String>,
}

impl Snapshot {
    /// A snapshot of these documents.
    pub fn of(documents: Vec<Value>) -> Self {
        let mut snapshot = Self::default();
        for document in documents {
            let partition = text(&document, "instanceId").to_owned();
            snapshot.partitions.entry(partition).or_default().push(document);
        }
        snapshot
    }

    /// Adds the names of deleted instances. A child whose start was not delivered before the deletion begins without
    /// its parent, as it does with duroxide's SQLite provider. A child that had begun is deleted with its parent: see
    /// `Deletions`.
    pub fn with_deleted(self, deleted: BTreeSet<String>) -> Self {
        Self { deleted, ..self }
    }

    fn documents(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.partitions.iter().flat_map(|(partition, documents)| documents.iter().map(move |d| (partition, d)))
    }

    /// A violation for each document that exists only while an operation is in progress.
    pub fn transient_documents(&self) -> Vec<Violation> {
        let is_transient =
            |document: &Value| TRANSIENT.contains(&text(document, "type")) || !document["inlined"].is_null();
        let left = self.documents().filter(|(_, document)| is_transient(document));
        let left = left.filter(|(partition, document)| !self.may_stay_deferred(partition, document));
        let violations = left.map(|(partition, document)| Violation {
            invariant: NOTHING_LEFT,
            instance: partition.clone(),
            detail: format!("there is still {document}"),
        });
        violations.collect()
    }

    /// Whether it is one of two messages that may stay deferred without an instance:
    /// - the cancellation of a child that was never started, because its parent was cancelled in the turn that would
    ///   have started it,
    /// - a queue message for a name that no client has started. The library drops it after a day.
    fn may_stay_deferred(&self, partition: &str, document: &Value) -> bool {
        let is_known = text(document, "item").contains("CancelInstance") || document["orphanSince"].is_u64();
        let may_stay = is_deferred(document) && is_known;
        let documents = self.partitions.get(partition).into_iter().flatten();
        let is_instance = |other: &Value| text(other, "type") == "instance" && !other["status"].is_null();
        may_stay && !documents.into_iter().any(is_instance)
    }

    /// The violations in instance documents and histories. `ended`: the run is over, so nothing may be in progress.
    pub fn violations(&self, expected: &BTreeMap<String, ExpectedOutcome>, ended: bool) -> Vec<Violation> {
        let mut violations = Vec::new();
        for (name, documents) in &self.partitions {
            violations.extend(unannounced(name, documents));
            violations.extend(documents.iter().filter_map(|document| invisible(name, document)));
            let Some(instance) = documents.iter().find(|d| text(d, "type") == "instance") else {
                if ended {
                    violations.extend(self.without_instance(name, documents));
                }
                continue;
            };
            // An instance document without a status exists as long as a message for it is deferred.
            if instance["status"].is_null() && instance["deferred"] == true && documents.iter().any(is_deferred) {
                continue;
            }
            let violation = |detail: String| Violation { invariant: "documents agree", instance: name.clone(), detail };
            if ended {
                violations.extend(unfinished(instance).into_iter().map(violation));
                violations.extend(self.unexpected(name, instance, expected).map(violation));
            }
            // An operation in several steps is checked when it is complete.
            if ["rollForward", "deleting", "pruning"].iter().any(|property| !instance[*property].is_null()) {
                continue;
            }
            let Some(status) = instance["status"].as_str() else {
                violations.extend(ended.then(|| violation(format!("a lock without an instance: {instance}"))));
                continue;
            };
            let executions = executions(documents);
            violations
                .extend(executions.iter().flat_map(|(execution, events)| history_violations(name, *execution, events)));
            let current = instance["execution"].as_u64().unwrap_or(0);
            violations.extend(disagreement(instance, status, executions.get(&current)).map(violation));
            violations.extend(miscounted(instance, &executions).map(violation));
            if ended {
                violations.extend(self.missing_children(name, executions.values().flatten()));
            }
        }
        violations
    }

    /// The violation if a partition without an instance document holds another document than:
    /// - sessions, counters, the format, members, wake-ups, shared results,
    /// - markers of messages that were delivered before the deletion.
    fn without_instance(&self, name: &str, documents: &[Value]) -> Option<Violation> {
        let unexpected = documents.iter().find(|d| {
            !["session", "counters", "format", "member", "wakeup", "sharedResult", "delivered"]
                .contains(&text(d, "type"))
        })?;
        let is_transient = TRANSIENT.contains(&text(unexpected, "type"));
        (!is_transient).then(|| Violation {
            invariant: NOTHING_LEFT,
            instance: name.to_owned(),
            detail: format!("there is no instance, but {unexpected}"),
        })
    }

    /// Describes an instance without an origin: no client has started it, or its parent is missing.
    fn unexpected(&self, name: &str, instance: &Value, expected: &BTreeMap<String, ExpectedOutcome>) -> Option<String> {
        match instance["parent"].as_str() {
            None => (!expected.contains_key(name)).then(|| format!("no client has started {instance}")),
            Some(parent) => {
                let exists = |d: &Value| text(d, "type") == "instance";
                let found = self.partitions.get(parent).is_some_and(|documents| documents.iter().any(exists));
                (!found && !self.deleted.contains(parent)).then(|| format!("its parent {parent:?} does not exist"))
            }
        }
    }

    fn missing_children<'a>(&self, name: &str, events: impl Iterator<Item = &'a Event>) -> Vec<Violation> {
        let mut violations = Vec::new();
        for event in events {
            if let EventKind::SubOrchestrationScheduled { instance, .. } = &event.kind {
                if !self.partitions.keys().any(|partition| partition.ends_with(instance.as_str())) {
                    violations.push(Violation {
                        invariant: "every started child exists",
                        instance: name.to_owned(),
                        detail: format!("event {} has started {instance:?}, which does not exist", event.event_id),
                    });
                }
            }
        }
        violations
    }

    /// The metrics that these documents imply.
    pub fn metrics(&self) -> SystemMetrics {
        let mut metrics = SystemMetrics::default();
        for instance in self.documents().map(|(_, document)| document).filter(|d| text(d, "type") == "instance") {
            let Some(status) = instance["status"].as_str() else { continue };
            metrics.total_instances += 1;
            metrics.total_executions += instance["totals"]["executions"].as_u64().unwrap_or(0);
            metrics.total_events += instance["totals"]["events"].as_u64().unwrap_or(0);
            match status {
                "Completed" => metrics.completed_instances += 1,
                "Failed" => metrics.failed_instances += 1,
                _ => metrics.running_instances += 1,
            }
        }
        metrics
    }
}

/// Compares the status of each instance with its expected outcome.
pub async fn outcomes(client: &Client, expected: &BTreeMap<String, ExpectedOutcome>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (instance, outcome) in expected {
        match client.get_orchestration_status(instance).await {
            Ok(status) => violations.extend(outcome.violation(instance, &status)),
            Err(error) => violations.push(Violation {
                invariant: OUTCOME,
                instance: instance.clone(),
                detail: format!("its status can't be read: {error}"),
            }),
        }
    }
    violations
}

/// Compares the provider's metrics with the stored instances.
pub async fn counters(provider: &CosmosDBProvider, snapshot: &Snapshot) -> Option<Violation> {
    let wanted = format!("{:?}", snapshot.metrics());
    let found = match provider.get_system_metrics().await {
        Ok(found) => format!("{found:?}"),
        Err(error) => error.to_string(),
    };
    (wanted != found).then(|| Violation {
        invariant: "counters agree with the instances",
        instance: "$metrics".to_owned(),
        detail: format!("wanted {wanted}, found {found}"),
    })
}

/// Runs a doctor. A finding of a lost or unreferenced document is a bug of the provider or of the doctor, because the
/// run itself removes no document.
pub async fn losses(provider: &CosmosDBProvider) -> Option<Violation> {
    let violation = |instance: &str, detail: String| Violation {
        invariant: "no document is lost",
        instance: instance.to_owned(),
        detail,
    };
    let doctor = match provider.doctor().await {
        Ok(doctor) => doctor,
        Err(error) => return Some(violation("", error.to_string())),
    };
    let mut scan = doctor.scan(Duration::ZERO, true);
    while let Some(page) = scan.next().await.transpose() {
        let page = match page {
            Ok(page) => page,
            Err(error) => return Some(violation("", error.to_string())),
        };
        for instance in page {
            let diagnosis = match doctor.diagnose(&instance).await {
                Ok(Some(diagnosis)) => diagnosis,
                Ok(None) => continue,
                Err(error) => return Some(violation(&instance, error.to_string())),
            };
            // A worker that has just crashed leaves late and unfinished work. The parent of an orphan may be about to
            // be deleted.
            let is_expected = |reason: Reason| {
                use Reason::{HalfCommitted, HalfDeleted, Idle, Late, Orphan, Undelivered};
                matches!(reason, Late | HalfCommitted | HalfDeleted | Undelivered | Orphan | Idle)
            };
            if let Some(found) = diagnosis.findings.iter().find(|finding| !is_expected(finding.reason)) {
                return Some(violation(&instance, format!("{}: {}", found.reason, found.detail)));
            }
        }
    }
    None
}

/// Whether it is a deferred message: it waits for the start of its instance, and no poll finds it.
fn is_deferred(document: &Value) -> bool {
    text(document, "type") == "message" && document["due"] == DEFERRED
}

/// The violation if a partition holds a deferred message that its instance document does not announce: no turn would
/// ever consume it. The roll-forward of a staged turn removes a message that the turn has consumed.
fn unannounced(name: &str, documents: &[Value]) -> Option<Violation> {
    let announces = |document: &Value| {
        text(document, "type") == "instance" && (document["deferred"] == true || !document["rollForward"].is_null())
    };
    let deferred = documents.iter().find(|document| is_deferred(document))?;
    (!documents.iter().any(announces)).then(|| Violation {
        invariant: "every deferred message is announced",
        instance: name.to_owned(),
        detail: format!("no instance document announces {deferred}"),
    })
}

/// The violation if no poll finds an inlined message after the crash of its worker.
fn invisible(name: &str, document: &Value) -> Option<Violation> {
    (!document["inlined"].is_null() && document["due"].is_null()).then(|| Violation {
        invariant: "a poll finds every inlined message",
        instance: name.to_owned(),
        detail: format!("no poll finds {document}"),
    })
}

fn text<'a>(document: &'a Value, property: &str) -> &'a str {
    document[property].as_str().unwrap_or("")
}

/// The properties of an instance document that must be absent when no operation is in progress.
fn unfinished(instance: &Value) -> Vec<String> {
    let in_progress = ["staging", "rollForward", "deleting", "pruning", "deferred", "due"];
    let found = in_progress.iter().filter(|property| !instance[**property].is_null());
    found.map(|property| format!("{property} is {}", instance[*property])).collect()
}

/// The events of each execution, in order.
fn executions(documents: &[Value]) -> BTreeMap<u64, Vec<Event>> {
    let mut executions: BTreeMap<u64, Vec<Event>> = BTreeMap::new();
    for history in documents.iter().filter(|d| text(d, "type") == "history") {
        let events = history["events"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let events = events.filter_map(|event| serde_json::from_str::<Event>(event).ok());
        executions.entry(history["execution"].as_u64().unwrap_or(0)).or_default().extend(events);
    }
    for events in executions.values_mut() {
        events.sort_by_key(|event| event.event_id);
    }
    executions
}

/// The violations in the history of one execution.
fn history_violations(instance: &str, execution: u64, events: &[Event]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut report = |invariant: &'static str, detail: String| {
        let detail = format!("execution {execution}: {detail}");
        violations.push(Violation { invariant, instance: instance.to_owned(), detail });
    };
    let ordinary: Vec<&Event> = events.iter().filter(|event| event.event_id != POISON).collect();
    for (position, event) in ordinary.iter().enumerate() {
        if event.event_id != position as u64 + 1 {
            report("event ids have no gap or repeat", format!("event {} at position {}", event.event_id, position + 1));
            break;
        }
    }
    // A first turn that is too large to be stored leaves only its failure.
    let has_only_failed = matches!(events, [Event { kind: EventKind::OrchestrationFailed { .. }, .. }]);
    if !has_only_failed && !matches!(events.first().map(|e| &e.kind), Some(EventKind::OrchestrationStarted { .. })) {
        report("a history begins with its start", format!("it begins with {:?}", events.first()));
    }
    let starts = events.iter().filter(|event| matches!(event.kind, EventKind::OrchestrationStarted { .. })).count();
    if starts > 1 {
        report("a history has one start", format!("there are {starts}"));
    }
    // The turn that ends an orchestration records after the terminal event which activities it has cancelled.
    let mut after_end = events.iter().skip_while(|event| !is_terminal(event)).skip(1);
    if let Some(event) = after_end.find(|event| !is_cancellation(event)) {
        report("no event follows a terminal event", format!("{event:?}"));
    }
    let mut completed = BTreeSet::new();
    let scheduled: BTreeSet<u64> =
        events.iter().filter(|event| is_schedule(event)).map(|event| event.event_id).collect();
    for event in events.iter().filter(|event| is_completion(event)) {
        let source = event.source_event_id.unwrap_or(0);
        if !completed.insert(source) {
            report(ONE_COMPLETION, format!("{source} has another one: {event:?}"));
        }
        if !scheduled.contains(&source) {
            report("each completion has a schedule", format!("{event:?}"));
        }
    }
    let is_completed = events.iter().any(|event| matches!(event.kind, EventKind::OrchestrationCompleted { .. }));
    let dropped: BTreeSet<u64> =
        events.iter().filter(|e| is_cancellation(e)).filter_map(|e| e.source_event_id).collect();
    let timers: BTreeSet<u64> =
        events.iter().filter(|e| matches!(e.kind, EventKind::TimerCreated { .. })).map(|e| e.event_id).collect();
    if is_completed {
        // No event records a timer that lost a race.
        for open in
            scheduled.iter().filter(|id| !completed.contains(id) && !dropped.contains(id) && !timers.contains(id))
        {
            report(ONE_COMPLETION, format!("{open} has none, although the orchestration has completed"));
        }
    }
    violations
}

fn is_terminal(event: &Event) -> bool {
    matches!(
        event.kind,
        EventKind::OrchestrationCompleted { .. }
            | EventKind::OrchestrationFailed { .. }
            | EventKind::OrchestrationContinuedAsNew { .. }
    )
}

fn is_schedule(event: &Event) -> bool {
    matches!(
        event.kind,
        EventKind::ActivityScheduled { .. }
            | EventKind::TimerCreated { .. }
            | EventKind::SubOrchestrationScheduled { .. }
    )
}

fn is_completion(event: &Event) -> bool {
    matches!(
        event.kind,
        EventKind::ActivityCompleted { .. }
            | EventKind::ActivityFailed { .. }
            | EventKind::TimerFired { .. }
            | EventKind::SubOrchestrationCompleted { .. }
            | EventKind::SubOrchestrationFailed { .. }
    )
}

fn is_cancellation(event: &Event) -> bool {
    matches!(event.kind, EventKind::ActivityCancelRequested { .. } | EventKind::SubOrchestrationCancelRequested { .. })
}

/// The difference between an instance document and the history of its current execution.
fn disagreement(instance: &Value, status: &str, events: Option<&Vec<Event>>) -> Option<String> {
    let last = events.and_then(|events| events.iter().rfind(|event| !is_cancellation(event))).map(|event| &event.kind);
    let agrees = match last {
        Some(EventKind::OrchestrationCompleted { .. }) => status == "Completed",
        Some(EventKind::OrchestrationFailed { .. }) => status == "Failed",
        Some(EventKind::OrchestrationContinuedAsNew { .. }) => status == "ContinuedAsNew",
        _ => status == "Running",
    };
    if !agrees {
        return Some(format!("its status is {status}, its last event {last:?}"));
    }
    let listed: Vec<(u64, u64)> = serde_json::from_value(instance["events"].clone()).unwrap_or_default();
    let listed: BTreeSet<u64> = listed.into_iter().flat_map(|(first, last)| first..=last).collect();
    let found: BTreeSet<u64> = events.into_iter().flatten().map(|event| event.event_id).collect();
    (listed != found).then(|| format!("it lists {} events, and has {}", listed.len(), found.len()))
}

/// The difference between the totals of an instance and its histories.
fn miscounted(instance: &Value, executions: &BTreeMap<u64, Vec<Event>>) -> Option<String> {
    let listed = (instance["totals"]["executions"].as_u64(), instance["totals"]["events"].as_u64());
    let events: usize = executions.values().map(Vec::len).sum();
    let found = (Some(executions.len() as u64), Some(events as u64));
    (listed != found).then(|| format!("it counts {listed:?} executions and events, and has {found:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn without_status(deferred: bool) -> Value {
        json!({"id": "instance", "instanceId": "nobody", "type": "instance", "deferred": deferred.then_some(true)})
    }

    fn message(due: u64) -> Value {
        json!({"id": "m:1", "instanceId": "nobody", "type": "message", "due": due, "item": "{\"CancelInstance\":{}}"})
    }

    /// The number of violations and of transient documents.
    fn counts(documents: Vec<Value>) -> (usize, usize) {
        let snapshot = Snapshot::of(documents);
        (snapshot.violations(&BTreeMap::new(), true).len(), snapshot.transient_documents().len())
    }

    #[test]
    fn a_document_without_a_status_exists_only_beside_a_deferred_message() {
        assert_eq!(counts(vec![without_status(true), message(DEFERRED)]), (0, 0));
        assert!(counts(vec![without_status(true)]).0 > 0, "no message is deferred");
        assert!(counts(vec![without_status(false)]).0 > 0, "a lock that was left");
        assert!(counts(vec![without_status(false), message(DEFERRED)]).0 > 0, "not announced");
        assert!(counts(vec![message(DEFERRED)]).0 > 0, "no turn would ever consume it");
        assert_eq!(counts(vec![without_status(true), message(1)]).1, 1, "the message is not deferred");
    }

    #[test]
    fn an_inlined_message_is_transient_and_a_poll_finds_it() {
        let violations = |due: Option<u64>| {
            let mut document = without_status(false);
            (document["inlined"], document["due"]) = (json!({"id": "m:1"}), json!(due));
            let snapshot = Snapshot::of(vec![document]);
            assert_eq!(snapshot.transient_documents().len(), 1);
            snapshot.violations(&BTreeMap::new(), false).len()
        };
        assert_eq!((violations(Some(1)), violations(None)), (0, 1));
    }
}
