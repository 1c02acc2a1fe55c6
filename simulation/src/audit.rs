//! What must hold of everything that is stored, when all is quiet.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use duroxide::providers::{ProviderAdmin, SystemMetrics};
use duroxide::{Client, Event, EventKind};
use duroxide_cosmos::operate::Reason;
use duroxide_cosmos::CosmosDBProvider;
use serde_json::Value;

use crate::errand::Fate;
use crate::ledger::Broken;

/// The event that duroxide writes where it gives something up has this id, whatever comes before it.
const POISON: u64 = 99_999;
/// What is only there while something is under way.
const PASSING: [&str; 6] = ["message", "activity", "payload", "intent", "staged", "plan"];

/// The `due` of a message that waits for the start of its instance.
const PARKED: u64 = (1 << 53) - 1;

/// Everything that is stored.
#[derive(Debug, Default)]
pub struct Inventory {
    partitions: BTreeMap<String, Vec<Value>>,
    deleted: BTreeSet<String>,
}

impl Inventory {
    /// Of these documents.
    pub fn of(documents: Vec<Value>) -> Self {
        let mut inventory = Self::default();
        for document in documents {
            let partition = text(&document, "instanceId").to_owned();
            inventory.partitions.entry(partition).or_default().push(document);
        }
        inventory
    }

    /// These instances were deleted. A child that had not begun by then, its start still being on its way, begins without its parent,
    /// as it does with duroxide's SQLite provider. A child that had begun goes with its parent: see `Deletions`.
    pub fn after_deletions_of(self, deleted: BTreeSet<String>) -> Self {
        Self { deleted, ..self }
    }

    fn documents(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.partitions.iter().flat_map(|(partition, documents)| documents.iter().map(move |d| (partition, d)))
    }

    /// Documents that are only there while something is under way.
    pub fn passing(&self) -> Vec<Broken> {
        let is_retryable =
            |document: &Value| PASSING.contains(&text(document, "type")) || !document["inlined"].is_null();
        let left = self.documents().filter(|(_, document)| is_retryable(document));
        let left = left.filter(|(partition, document)| !self.is_for_nobody(partition, document));
        let broken = left.map(|(partition, document)| Broken {
            invariant: "nothing is left behind",
            instance: partition.clone(),
            detail: format!("there is still {document}"),
        });
        broken.collect()
    }

    /// Whether it is duroxide's word to a child that was never started, since its parent was cancelled in the very turn that
    /// would have started it: nobody is there to take it, and it is parked. Or a queue message for a name that nobody has
    /// started, which is dropped after a day.
    fn is_for_nobody(&self, partition: &str, document: &Value) -> bool {
        let is_known = text(document, "item").contains("CancelInstance") || document["orphanSince"].is_u64();
        let is_parked_for_nobody = is_parked(document) && is_known;
        let documents = self.partitions.get(partition).into_iter().flatten();
        let is_instance = |other: &Value| text(other, "type") == "instance" && !other["status"].is_null();
        is_parked_for_nobody && !documents.into_iter().any(is_instance)
    }

    /// What is wrong with the instances and their histories.
    pub fn faults(&self, fates: &BTreeMap<String, Fate>, ended: bool) -> Vec<Broken> {
        let mut broken = Vec::new();
        for (name, documents) in &self.partitions {
            broken.extend(unmarked(name, documents));
            broken.extend(documents.iter().filter_map(|document| unseen(name, document)));
            let Some(instance) = documents.iter().find(|d| text(d, "type") == "instance") else {
                if ended {
                    broken.extend(self.without_instance(name, documents));
                }
                continue;
            };
            // A name that nobody has started is there as long as something is parked for it.
            if instance["status"].is_null() && instance["deferred"] == true && documents.iter().any(is_parked) {
                continue;
            }
            let say = |detail: String| Broken { invariant: "documents agree", instance: name.clone(), detail };
            if ended {
                broken.extend(unfinished(instance).into_iter().map(say));
                broken.extend(self.unexpected(name, instance, fates).map(say));
            }
            // What is half done on purpose is looked at when it is done.
            if ["rollForward", "deleting", "pruning"].iter().any(|property| !instance[*property].is_null()) {
                continue;
            }
            let Some(status) = instance["status"].as_str() else {
                broken.extend(ended.then(|| say(format!("a lock without an instance: {instance}"))));
                continue;
            };
            let executions = executions(documents);
            broken.extend(executions.iter().flat_map(|(execution, events)| wrong_history(name, *execution, events)));
            let current = instance["execution"].as_u64().unwrap_or(0);
            broken.extend(disagreement(instance, status, executions.get(&current)).map(say));
            broken.extend(miscounted(instance, &executions).map(say));
            if ended {
                broken.extend(self.missing_children(name, executions.values().flatten()));
            }
        }
        broken
    }

    /// A partition with no instance may hold sessions, counters, the format, markers of what was delivered before it was deleted.
    fn without_instance(&self, name: &str, documents: &[Value]) -> Option<Broken> {
        let odd = documents.iter().find(|d| {
            !["session", "counters", "format", "member", "wakeup", "sharedResult", "delivered"]
                .contains(&text(d, "type"))
        })?;
        let passing = PASSING.contains(&text(odd, "type"));
        (!passing).then(|| Broken {
            invariant: "nothing is left behind",
            instance: name.to_owned(),
            detail: format!("there is no instance, but {odd}"),
        })
    }

    fn unexpected(&self, name: &str, instance: &Value, fates: &BTreeMap<String, Fate>) -> Option<String> {
        match instance["parent"].as_str() {
            None => (!fates.contains_key(name)).then(|| format!("nobody has started {instance}")),
            Some(parent) => {
                let exists = |d: &Value| text(d, "type") == "instance";
                let found = self.partitions.get(parent).is_some_and(|documents| documents.iter().any(exists));
                (!found && !self.deleted.contains(parent)).then(|| format!("its parent {parent:?} is not there"))
            }
        }
    }

    fn missing_children<'a>(&self, name: &str, events: impl Iterator<Item = &'a Event>) -> Vec<Broken> {
        let mut broken = Vec::new();
        for event in events {
            if let EventKind::SubOrchestrationScheduled { instance, .. } = &event.kind {
                if !self.partitions.keys().any(|partition| partition.ends_with(instance.as_str())) {
                    broken.push(Broken {
                        invariant: "children are there",
                        instance: name.to_owned(),
                        detail: format!("event {} has started {instance:?}, which is not there", event.event_id),
                    });
                }
            }
        }
        broken
    }

    /// What the metrics must say.
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

/// Asks how each instance has ended.
pub async fn endings(client: &Client, fates: &BTreeMap<String, Fate>) -> Vec<Broken> {
    let mut broken = Vec::new();
    for (instance, fate) in fates {
        match client.get_orchestration_status(instance).await {
            Ok(status) => broken.extend(fate.differs(instance, &status)),
            Err(error) => broken.push(Broken {
                invariant: "every orchestration ends as it must",
                instance: instance.clone(),
                detail: format!("its status can't be read: {error}"),
            }),
        }
    }
    broken
}

/// Compares the metrics with what is there.
pub async fn counters(provider: &CosmosDBProvider, inventory: &Inventory) -> Option<Broken> {
    let wanted = format!("{:?}", inventory.metrics());
    let found = match provider.get_system_metrics().await {
        Ok(found) => format!("{found:?}"),
        Err(error) => error.to_string(),
    };
    (wanted != found).then(|| Broken {
        invariant: "counters agree with the instances",
        instance: "$metrics".to_owned(),
        detail: format!("wanted {wanted}, found {found}"),
    })
}

/// What a doctor finds lost, or in nobody's use, although nothing was taken away: a fault of the provider's, or the doctor's.
pub async fn losses(provider: &CosmosDBProvider) -> Option<Broken> {
    let broken = |instance: &str, detail: String| Broken {
        invariant: "nothing is lost where nothing was taken away",
        instance: instance.to_owned(),
        detail,
    };
    let doctor = match provider.doctor().await {
        Ok(doctor) => doctor,
        Err(error) => return Some(broken("", error.to_string())),
    };
    let mut suspects = doctor.scan(Duration::ZERO, true);
    while let Some(page) = suspects.next().await.transpose() {
        let page = match page {
            Ok(page) => page,
            Err(error) => return Some(broken("", error.to_string())),
        };
        for instance in page {
            let diagnosis = match doctor.diagnose(&instance).await {
                Ok(Some(diagnosis)) => diagnosis,
                Ok(None) => continue,
                Err(error) => return Some(broken(&instance, error.to_string())),
            };
            // What is late, or half done, is somebody's who has just died; a parent may be on its way out.
            let passes = |reason: Reason| {
                use Reason::{HalfCommitted, HalfDeleted, Idle, Late, Orphan, Undelivered};
                matches!(reason, Late | HalfCommitted | HalfDeleted | Undelivered | Orphan | Idle)
            };
            if let Some(found) = diagnosis.findings.iter().find(|finding| !passes(finding.reason)) {
                return Some(broken(&instance, format!("{}: {}", found.reason, found.detail)));
            }
        }
    }
    None
}

/// Whether it is a message that waits, out of the polls' sight, for the start of its instance.
fn is_parked(document: &Value) -> bool {
    text(document, "type") == "message" && document["due"] == PARKED
}

/// A parked message in a partition whose instance's document does not say that there is one: nobody would ever see it. One that a
/// large turn has taken goes when that turn is rolled forward.
fn unmarked(name: &str, documents: &[Value]) -> Option<Broken> {
    let says_so = |document: &Value| {
        text(document, "type") == "instance" && (document["deferred"] == true || !document["rollForward"].is_null())
    };
    let parked = documents.iter().find(|document| is_parked(document))?;
    (!documents.iter().any(says_so)).then(|| Broken {
        invariant: "what is parked is known",
        instance: name.to_owned(),
        detail: format!("nothing says that there is {parked}"),
    })
}

/// A message inside an instance's document that no poll would ever find, if its worker died.
fn unseen(name: &str, document: &Value) -> Option<Broken> {
    (!document["inlined"].is_null() && document["due"].is_null()).then(|| Broken {
        invariant: "what is enclosed is seen",
        instance: name.to_owned(),
        detail: format!("nobody would look at {document}"),
    })
}

fn text<'a>(document: &'a Value, property: &str) -> &'a str {
    document[property].as_str().unwrap_or("")
}

/// What must not be in the document of an instance that nobody works on.
fn unfinished(instance: &Value) -> Vec<String> {
    let under_way = ["staging", "rollForward", "deleting", "pruning", "deferred", "due"];
    let found = under_way.iter().filter(|property| !instance[**property].is_null());
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

/// What is wrong with the history of one execution.
fn wrong_history(instance: &str, execution: u64, events: &[Event]) -> Vec<Broken> {
    let mut broken = Vec::new();
    let mut say = |invariant: &'static str, detail: String| {
        let detail = format!("execution {execution}: {detail}");
        broken.push(Broken { invariant, instance: instance.to_owned(), detail });
    };
    let ordinary: Vec<&Event> = events.iter().filter(|event| event.event_id != POISON).collect();
    for (position, event) in ordinary.iter().enumerate() {
        if event.event_id != position as u64 + 1 {
            say("event ids have no gap or repeat", format!("event {} at position {}", event.event_id, position + 1));
            break;
        }
    }
    // A first turn that can't be stored leaves nothing but its failure.
    let never_began = matches!(events, [Event { kind: EventKind::OrchestrationFailed { .. }, .. }]);
    if !never_began && !matches!(events.first().map(|e| &e.kind), Some(EventKind::OrchestrationStarted { .. })) {
        say("a history begins with its start", format!("it begins with {:?}", events.first()));
    }
    let starts = events.iter().filter(|event| matches!(event.kind, EventKind::OrchestrationStarted { .. })).count();
    if starts > 1 {
        say("each start is taken once", format!("there are {starts}"));
    }
    // The turn that ends an orchestration says after that which activities it has dropped.
    let mut after_end = events.iter().skip_while(|event| !is_terminal(event)).skip(1);
    if let Some(event) = after_end.find(|event| !is_cancellation(event)) {
        say("nothing comes after a terminal event", format!("{event:?}"));
    }
    let mut completed = BTreeSet::new();
    let scheduled: BTreeSet<u64> =
        events.iter().filter(|event| is_schedule(event)).map(|event| event.event_id).collect();
    for event in events.iter().filter(|event| is_completion(event)) {
        let source = event.source_event_id.unwrap_or(0);
        if !completed.insert(source) {
            say("each schedule has one completion", format!("{source} has another one: {event:?}"));
        }
        if !scheduled.contains(&source) {
            say("each completion has a schedule", format!("{event:?}"));
        }
    }
    let ends_well = events.iter().any(|event| matches!(event.kind, EventKind::OrchestrationCompleted { .. }));
    let dropped: BTreeSet<u64> =
        events.iter().filter(|e| is_cancellation(e)).filter_map(|e| e.source_event_id).collect();
    let timers: BTreeSet<u64> =
        events.iter().filter(|e| matches!(e.kind, EventKind::TimerCreated { .. })).map(|e| e.event_id).collect();
    if ends_well {
        // Timers that lost a race are dropped without a word.
        for open in
            scheduled.iter().filter(|id| !completed.contains(id) && !dropped.contains(id) && !timers.contains(id))
        {
            say(
                "each schedule has one completion",
                format!("{open} has none, although the orchestration has ended well"),
            );
        }
    }
    broken
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

/// How the instance's document and the history of its current execution differ.
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
    let noted: Vec<(u64, u64)> = serde_json::from_value(instance["events"].clone()).unwrap_or_default();
    let noted: BTreeSet<u64> = noted.into_iter().flat_map(|(first, last)| first..=last).collect();
    let found: BTreeSet<u64> = events.into_iter().flatten().map(|event| event.event_id).collect();
    (noted != found).then(|| format!("it notes {} events, and has {}", noted.len(), found.len()))
}

/// How the instance's totals and its histories differ.
fn miscounted(instance: &Value, executions: &BTreeMap<u64, Vec<Event>>) -> Option<String> {
    let noted = (instance["totals"]["executions"].as_u64(), instance["totals"]["events"].as_u64());
    let events: usize = executions.values().map(Vec::len).sum();
    let found = (Some(executions.len() as u64), Some(events as u64));
    (noted != found).then(|| format!("it notes {noted:?} executions and events, and has {found:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shell(parked: bool) -> Value {
        json!({"id": "instance", "instanceId": "nobody", "type": "instance", "deferred": parked.then_some(true)})
    }

    fn message(due: u64) -> Value {
        json!({"id": "m:1", "instanceId": "nobody", "type": "message", "due": due, "item": "{\"CancelInstance\":{}}"})
    }

    /// How many things are wrong with these documents, and how many are left behind.
    fn wrong(documents: Vec<Value>) -> (usize, usize) {
        let inventory = Inventory::of(documents);
        (inventory.faults(&BTreeMap::new(), true).len(), inventory.passing().len())
    }

    #[test]
    fn a_document_without_an_instance_is_there_just_where_something_is_parked() {
        assert_eq!(wrong(vec![shell(true), message(PARKED)]), (0, 0));
        assert!(wrong(vec![shell(true)]).0 > 0, "nothing is parked");
        assert!(wrong(vec![shell(false)]).0 > 0, "a lock that somebody left");
        assert!(wrong(vec![shell(false), message(PARKED)]).0 > 0, "nothing says so");
        assert!(wrong(vec![message(PARKED)]).0 > 0, "nobody would ever see it");
        assert_eq!(wrong(vec![shell(true), message(1)]).1, 1, "it is not parked");
    }

    #[test]
    fn an_enclosed_message_is_something_under_way_that_a_poll_must_find() {
        let faults = |due: Option<u64>| {
            let mut document = shell(false);
            (document["inlined"], document["due"]) = (json!({"id": "m:1"}), json!(due));
            let inventory = Inventory::of(vec![document]);
            assert_eq!(inventory.passing().len(), 1);
            inventory.faults(&BTreeMap::new(), false).len()
        };
        assert_eq!((faults(Some(1)), faults(None)), (0, 1));
    }
}
