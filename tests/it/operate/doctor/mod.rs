//! The doctor: it names each inconsistency of an instance and repairs those that the history can explain.

mod earlier_executions;
mod findings;
mod healthy_instances;
mod lost_documents;
mod lost_instances;
mod regions_and_clocks;
mod repair_races;
mod repairs;

use crate::fixture::*;
use duroxide::{providers::Provider, Event, EventKind};
use duroxide_cosmos::{
    operate::{Diagnosis, Reason, Remedy, Repair},
    CosmosDBProvider,
};
use serde_json::{json, Value};

pub const HOUR: i64 = 3_600_000;

/// Makes all documents of a type older by so many milliseconds.
pub async fn age(fixture: &Fixture, instance: &str, kind: &str, field: &str, by: i64) {
    for mut document in fixture.documents_of_type(instance, kind).await {
        document[field] = json!(document[field].as_i64().unwrap() - by);
        fixture.put(&document).await;
    }
}

pub async fn diagnose(provider: &CosmosDBProvider, instance: &str) -> Diagnosis {
    provider.doctor().await.unwrap().diagnose(instance).await.unwrap().expect("something of that name")
}

pub async fn repair(provider: &CosmosDBProvider, diagnosis: &Diagnosis) -> Repair {
    provider.doctor().await.unwrap().repair(diagnosis).await.unwrap()
}

pub fn reasons(diagnosis: &Diagnosis) -> Vec<Reason> {
    diagnosis.findings.iter().map(|finding| finding.reason).collect()
}

/// The only finding is this one. The doctor offers a repair, repairs it, and finds nothing afterwards.
pub async fn repaired_as_offered(provider: &CosmosDBProvider, instance: &str, reason: Reason) {
    let diagnosis = diagnose(provider, instance).await;
    assert_eq!(reasons(&diagnosis), [reason], "{diagnosis:#?}");
    assert!(matches!(diagnosis.findings[0].remedy, Remedy::Repair(_)), "{diagnosis:#?}");
    let repair = repair(provider, &diagnosis).await;
    assert_eq!((repair.done.len(), repair.hindered.as_deref()), (1, None), "{repair:#?}");
    assert_eq!(repair.after.expect("it is there").findings, [], "well after that");
}

/// The only finding is this one, and the doctor cannot repair it.
pub async fn not_repairable(provider: &CosmosDBProvider, instance: &str, reason: Reason) {
    let diagnosis = diagnose(provider, instance).await;
    assert_eq!(reasons(&diagnosis), [reason], "{diagnosis:#?}");
    assert!(matches!(diagnosis.findings[0].remedy, Remedy::ByHand(_)) && !diagnosis.can_be_repaired());
    let repair = repair(provider, &diagnosis).await;
    assert!(repair.done.is_empty(), "{repair:#?}");
}

pub fn scheduled_child(instance: &str, child: &str) -> duroxide::Event {
    let kind = EventKind::SubOrchestrationScheduled {
        name: "Orchestration".to_owned(),
        instance: child.to_owned(),
        input: "{}".to_owned(),
    };
    event(instance, 1, 2, kind)
}

/// Makes a parent that has started a child, with the event of the start.
pub async fn parent_and_child(provider: &CosmosDBProvider) {
    provider.enqueue_for_orchestrator(start("parent"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let events = vec![started("parent", 1), scheduled_child("parent", "child")];
    commit(provider, &token, events, Vec::new(), vec![start_child("child", Some("parent"))], running()).await.unwrap();
}

/// The only finding is this one. The doctor repairs it and finds nothing afterwards.
pub async fn repaired(provider: &CosmosDBProvider, instance: &str, reason: Reason) {
    let diagnosis = diagnose(provider, instance).await;
    assert_eq!(reasons(&diagnosis), [reason], "{diagnosis:#?}");
    let repair = repair(provider, &diagnosis).await;
    assert_eq!((repair.done.len(), repair.hindered.as_deref()), (1, None), "{repair:#?}");
    assert_eq!(repair.after.expect("it is there").findings, [], "well after that");
}

/// The only finding is this one, and the doctor leaves it to the operator. Returns its detail.
pub async fn left_to_the_operator(provider: &CosmosDBProvider, instance: &str, reason: Reason) -> String {
    let diagnosis = diagnose(provider, instance).await;
    assert_eq!(reasons(&diagnosis), [reason], "{diagnosis:#?}");
    assert!(matches!(diagnosis.findings[0].remedy, Remedy::ByHand(_)), "{diagnosis:#?}");
    diagnosis.findings[0].detail.clone()
}

pub fn waits_for(id: u64, name: &str) -> Event {
    event("i", 1, id, EventKind::ExternalSubscribed { name: name.to_owned() })
}

/// Runs the first turn of an instance, with these events after its start.
pub async fn first_turn(provider: &dyn Provider, instance: &str, mut events: Vec<Event>) {
    provider.enqueue_for_orchestrator(start(instance), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    events.insert(0, started(instance, 1));
    commit(provider, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
}

/// Makes an instance whose activity waits for a minute, and a member that has just renewed its document.
pub async fn waiting_activity(fixture: &Fixture, provider: &CosmosDBProvider, takes: Value) {
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let events = vec![started("i", 1), activity_scheduled("i", 2)];
    commit(provider, &token, events, vec![activity("i", 2)], Vec::new(), running()).await.unwrap();
    let mut work = fixture.only("i", "activity").await;
    work["due"] = (now() - 60_000).into();
    fixture.put(&work).await;
    for document in fixture.partition("$d:fleet").await {
        fixture.remove(&document).await;
    }
    let slots = json!({ "from": 0, "to": 256 });
    let mut member = json!({ "id": "member:m", "instanceId": "$d:fleet", "type": "member", "member": "m", "owners": [],
                             "turns": { "need": ["0.1.0", "0.2.0"], "slots": slots } });
    if !takes.is_null() {
        member["activities"] = json!({ "need": takes, "slots": slots });
    }
    fixture.put(&member).await;
}
