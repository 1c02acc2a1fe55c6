//! The doctor tells the truth. It finds a delivery that fails for hours and values that were lost long ago, and says
//! nothing of healthy instances. It repairs only what its write proves, whatever its region or its clock has missed.

#[path = "common/scene.rs"]
mod scene;

use azure_data_cosmos::{options::Region, CosmosClientBuilder, RoutingStrategy};
use duroxide::{
    providers::{ExecutionMetadata, Provider},
    Event, EventKind,
};
use duroxide_cosmos::{
    operate::{Diagnosis, Reason, Remedy, Repair},
    CosmosDBProvider,
};
use duroxide_cosmos_emulator::{Gate, LocalAccount, RequestKind, WireAction, WireRequest, WireRule};
use scene::*;
use serde_json::{json, Value};
use std::{sync::Arc, time::Duration};

const HOUR: u64 = 3_600_000;

async fn diagnose(provider: &CosmosDBProvider, instance: &str) -> Diagnosis {
    provider.doctor().await.unwrap().diagnose(instance).await.unwrap().expect("something of that name")
}

async fn repair(provider: &CosmosDBProvider, diagnosis: &Diagnosis) -> Repair {
    provider.doctor().await.unwrap().repair(diagnosis).await.unwrap()
}

fn reasons(diagnosis: &Diagnosis) -> Vec<Reason> {
    diagnosis.findings.iter().map(|finding| finding.reason).collect()
}

/// The doctor finds just this, repairs it, and finds nothing after that.
async fn repaired(provider: &CosmosDBProvider, instance: &str, reason: Reason) {
    let diagnosis = diagnose(provider, instance).await;
    assert_eq!(reasons(&diagnosis), [reason], "{diagnosis:#?}");
    let repair = repair(provider, &diagnosis).await;
    assert_eq!((repair.done.len(), repair.hindered.as_deref()), (1, None), "{repair:#?}");
    assert_eq!(repair.after.expect("it is there").findings, [], "well after that");
}

/// The doctor finds just this, and leaves it to somebody else.
async fn by_hand(provider: &CosmosDBProvider, instance: &str, reason: Reason) -> String {
    let diagnosis = diagnose(provider, instance).await;
    assert_eq!(reasons(&diagnosis), [reason], "{diagnosis:#?}");
    assert!(matches!(diagnosis.findings[0].remedy, Remedy::ByHand(_)), "{diagnosis:#?}");
    diagnosis.findings[0].detail.clone()
}

async fn put(scene: &Scene, document: &Value) {
    let own = document.as_object().unwrap().iter().filter(|(key, _)| !key.starts_with('_'));
    let own: Value = own.map(|(key, value)| (key.clone(), value.clone())).collect();
    let partition = own["instanceId"].as_str().unwrap().to_owned();
    scene.container().await.upsert_item(partition, own["id"].as_str().unwrap(), &own, None).await.unwrap();
}

async fn take_away(scene: &Scene, document: &Value) {
    let partition = document["instanceId"].as_str().unwrap().to_owned();
    scene.container().await.delete_item(partition, document["id"].as_str().unwrap(), None).await.unwrap();
}

async fn only(scene: &Scene, instance: &str, kind: &str) -> Value {
    let mut found = scene.of_kind(instance, kind).await;
    assert_eq!(found.len(), 1, "{kind} of {instance}: {found:?}");
    found.remove(0)
}

fn now() -> u64 {
    u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap()
}

fn scheduled(instance: &str, id: u64) -> Event {
    let name = "Activity".to_owned();
    let kind = EventKind::ActivityScheduled { name, input: "{}".to_owned(), session_id: None, tag: None };
    event(instance, 1, id, kind)
}

fn waits_for(id: u64, name: &str) -> Event {
    event("i", 1, id, EventKind::ExternalSubscribed { name: name.to_owned() })
}

/// The first turn of an instance, with these events after its start.
async fn first_turn(provider: &dyn Provider, instance: &str, mut events: Vec<Event>) {
    provider.enqueue_for_orchestrator(start(instance), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    events.insert(0, started(instance, 1));
    commit(provider, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
}

// ---------------------------------------------------------------------------------------------------- lagging regions

const HOME: &str = "East US";
const AWAY: &str = "West US";

async fn provider_in(account: &LocalAccount, name: &str, regions: [&str; 2]) -> CosmosDBProvider {
    let runtime = account.runtime_builder(name).build().await.expect("a runtime");
    let regions = regions.iter().map(|region| Region::new((*region).to_owned())).collect();
    let client = CosmosClientBuilder::new().with_runtime(runtime);
    let client = client.build(account.reference(), RoutingStrategy::PreferredRegions(regions)).await.expect("a client");
    CosmosDBProvider::new_with_client(&client, quiet().with_inline_claims(false)).await.expect("a provider")
}

/// Whether a request applies a part of a committed turn: it deletes the part's document.
fn applies_a_part(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let deletes =
        |op: &Value| op["operationType"] == "Delete" && op["id"].as_str().is_some_and(|id| id.starts_with("s:"));
    body.as_array().is_some_and(|operations| operations.iter().any(deletes))
}

/// The turn schedules 300 activities. Its history is in part 0, and most of its work in later parts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_doctor_whose_region_has_only_some_parts_of_a_turn_schedules_nothing_again() {
    const ACTIVITIES: u64 = 300;
    const ENDED: usize = 5;
    for parts in 0..4 {
        let account = LocalAccount::builder().with_regions(&[HOME, AWAY]).build();
        let worker = Arc::new(provider_in(&account, "worker", [HOME, AWAY]).await);
        let doctor = provider_in(&account, "doctor", [AWAY, HOME]).await;
        worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        let (_, token, _) = next_turn(&*worker, LONG).await;
        let ids = 2..2 + ACTIVITIES;
        let mut events = vec![started("i", 1)];
        events.extend(ids.clone().map(|id| scheduled("i", id)));
        let work = ids.map(|id| activity("i", id)).collect();
        let gate = Gate::new();
        let held = WireRule::new(WireAction::HoldBefore(gate.clone())).client("worker").on(RequestKind::Batch);
        account.wire().add(held.matching(applies_a_part).skip(parts).times(1));
        let turn = worker.clone();
        let committing = tokio::spawn(async move { commit(&*turn, &token, events, work, Vec::new(), running()).await });
        tokio::time::timeout(PATIENCE, gate.reached()).await.expect("a part is applied");
        // From here on the doctor's region hears of nothing.
        account.store().pause_replication(AWAY);
        gate.open();
        committing.await.unwrap().expect("the turn");
        for _ in 0..ENDED {
            let (item, token, _) = next_work(&*worker, LONG).await;
            let duroxide::providers::WorkItem::ActivityExecute { id, .. } = item else { panic!("{item:?}") };
            worker.ack_work_item(&token, Some(done("i", id))).await.unwrap();
        }
        let diagnosis = diagnose(&doctor, "i").await;
        assert_eq!(diagnosis.findings, [], "after {parts} parts");
        let repair = repair(&doctor, &diagnosis).await;
        assert!(repair.done.is_empty(), "after {parts} parts: {repair:#?}");
        let depths = admin(&worker).get_queue_depths().await.unwrap();
        assert_eq!(depths.worker_queue, ACTIVITIES as usize - ENDED, "after {parts} parts");
    }
}

// ------------------------------------------------------------------------------------------------------ lost instances

/// An instance that waits for an event and an activity, and whose document is gone.
async fn headless(scene: &Scene, provider: &CosmosDBProvider) -> Value {
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let events = vec![started("i", 1), scheduled("i", 2), waits_for(3, "Event")];
    commit(provider, &token, events, vec![activity("i", 2)], Vec::new(), running()).await.unwrap();
    let document = only(scene, "i", "instance").await;
    take_away(scene, &document).await;
    document
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_instance_is_made_again_after_a_worker_has_looked_at_one_of_its_messages() {
    let scene = Scene::new(1);
    headless(&scene, &scene.provider_with("first", quiet().with_inline_claims(false)).await).await;
    let worker = scene.provider("worker").await;
    worker.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let looked = worker.fetch_orchestration_item(LONG, NOW, None).await.expect("a fetch that works");
    assert!(looked.is_none(), "there is no instance: {looked:?}");
    repaired(&scene.provider("doctor").await, "i", Reason::LostInstance).await;
    let (item, token, _) = next_turn(&scene.provider("other").await, LONG).await;
    assert_eq!((item.instance.as_str(), item.history.len()), ("i", 3));
    assert_eq!(item.messages, [external("i", "x")], "the message is not lost either");
    drop(token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_instance_is_made_again_over_what_claims_have_left_of_it() {
    for parked in [false, true] {
        let scene = Scene::new(1);
        let before = headless(&scene, &scene.provider("first").await).await;
        let mut left = json!({ "id": "instance", "instanceId": "i", "type": "instance", "execution": 1, "incarnation": "other",
                               "createdAt": now(), "updatedAt": now(), "startedAt": now(), "due": now() });
        if parked {
            left["deferred"] = true.into();
            let item = serde_json::to_string(&external("i", "x")).unwrap();
            put(
                &scene,
                &json!({ "id": "m:e:x", "instanceId": "i", "type": "message", "due": 9_007_199_254_740_991u64,
                                 "seq": "1", "createdAt": now(), "item": item }),
            )
            .await;
        } else {
            (left["lock"], left["claims"]) = (json!({ "token": "dead", "until": 1 }), json!([1]));
        }
        put(&scene, &left).await;
        let doctor = scene.provider("doctor").await;
        let diagnosis = diagnose(&doctor, "i").await;
        assert_eq!(diagnosis.state, "has lost its document");
        repaired(&doctor, "i", Reason::LostInstance).await;
        let made = only(&scene, "i", "instance").await;
        for field in ["execution", "status", "name", "version", "events", "totals", "epoch", "turn"] {
            assert_eq!(made[field], before[field], "{field}");
        }
        assert_eq!((made["lock"].is_null(), made["deferred"] == true), (true, parked), "{made}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_has_lost_its_document_is_not_started_again() {
    let scene = Scene::new(1);
    let provider = scene.provider_with("worker", quiet().with_inline_claims(false)).await;
    provider.enqueue_for_orchestrator(start("parent"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let (name, instance, input) = ("Orchestration".to_owned(), "child".to_owned(), "{}".to_owned());
    let kind = EventKind::SubOrchestrationScheduled { name, instance, input };
    let events = vec![started("parent", 1), event("parent", 1, 2, kind)];
    let start = vec![start_child("child", Some("parent"))];
    commit(&provider, &token, events, Vec::new(), start, running()).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let metadata = ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..running() };
    let events = vec![started("child", 1), note("child", 1, 2)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
    take_away(&scene, &only(&scene, "child", "instance").await).await;
    put(
        &scene,
        &json!({ "id": "instance", "instanceId": "child", "type": "instance", "execution": 1, "deferred": true }),
    )
    .await;
    let doctor = scene.provider("doctor").await;
    assert!(by_hand(&doctor, "parent", Reason::LostChild).await.contains("has a history"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_is_not_made_from_a_history_that_is_deleted_meanwhile() {
    let scene = Scene::new(1);
    headless(&scene, &scene.provider("worker").await).await;
    let doctor = scene.provider("doctor").await;
    let diagnosis = diagnose(&doctor, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::LostInstance]);
    // The write of the document is on its way when the history goes.
    let gate = Gate::new();
    let makes = |request: &WireRequest<'_>| {
        let body = request.json().unwrap_or_default();
        let writes = |document: &Value| document["type"] == "instance";
        goes_to(request, "i")
            && (writes(&body) || body.as_array().is_some_and(|o| o.iter().any(|o| writes(&o["resourceBody"]))))
    };
    scene.account.wire().add(WireRule::new(WireAction::HoldBefore(gate.clone())).client("doctor").matching(makes));
    let repairing = tokio::spawn(async move { repair(&doctor, &diagnosis).await });
    tokio::time::timeout(PATIENCE, gate.reached()).await.expect("the document is made");
    for document in scene.partition("i").await {
        take_away(&scene, &document).await;
    }
    gate.open();
    let repair = repairing.await.unwrap();
    assert!(repair.done.is_empty(), "{repair:#?}");
    assert_eq!(scene.partition("i").await, Vec::<Value>::new(), "an instance without a history");
}

// ----------------------------------------------------------------------------------------------------- missed before

async fn suspects(provider: &CosmosDBProvider) -> Vec<String> {
    let mut suspects = provider.doctor().await.unwrap().scan(Duration::from_secs(600), false);
    let mut found = Vec::new();
    while let Some(page) = suspects.next().await.unwrap() {
        found.extend(page);
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_can_t_be_delivered_for_hours_is_found() {
    let scene = Scene::new(1);
    let provider = scene.provider("worker").await;
    let intent = |instance: &str, age: u64| {
        json!({ "id": "i:t:0", "instanceId": instance, "type": "intent", "createdAt": now() - age, "target": "x", "document": {},
                "due": now() + 50_000, "retries": 200 })
    };
    for instance in ["hours", "moment", "poisoned"] {
        finish(&provider, instance, None).await;
    }
    put(&scene, &intent("hours", 3 * HOUR)).await;
    // One failure a moment ago is no news.
    let mut young = intent("moment", 1_000);
    young["retries"] = 1.into();
    put(&scene, &young).await;
    let mut poisoned = intent("poisoned", HOUR);
    (poisoned["due"], poisoned["poisoned"]) = (Value::Null, "too large".into());
    poisoned.as_object_mut().unwrap().remove("due");
    put(&scene, &poisoned).await;
    let detail = by_hand(&provider, "hours", Reason::Undelivered).await;
    assert!(detail.contains("200 attempts"), "{detail}");
    assert_eq!(diagnose(&provider, "moment").await.findings, []);
    let mut found = suspects(&provider).await;
    found.sort();
    assert_eq!(found, ["hours", "poisoned"], "they are found without being named");
}

fn set(execution: u64, id: u64, key: &str, value: &str) -> Event {
    let (key, value) = (key.to_owned(), value.to_owned());
    event("i", execution, id, EventKind::KeyValueSet { key, value, last_updated_at_ms: 1_000 * execution })
}

/// An instance in its third execution. The first two ran two turns each.
async fn third_execution(provider: &CosmosDBProvider) {
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    for execution in 1..=3 {
        let (_, token, _) = next_turn(provider, LONG).await;
        let mut events = vec![started("i", execution)];
        match execution {
            1 => events.extend([set(1, 2, "old", "1"), set(1, 3, "both", "1"), set(1, 4, "cleared", "1")]),
            2 => events.push(event("i", 2, 2, EventKind::KeyValueCleared { key: "cleared".to_owned() })),
            _ => events.extend([set(3, 2, "both", "3"), note("i", 3, 3)]),
        }
        let next = events.len() as u64 + 1;
        commit(provider, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
        if execution < 3 {
            provider.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
            let (_, token, _) = next_turn(provider, LONG).await;
            let ends = EventKind::OrchestrationContinuedAsNew { input: "{}".to_owned() };
            let events = vec![event("i", execution, next, ends)];
            commit(provider, &token, events, Vec::new(), vec![again("i")], ended("ContinuedAsNew")).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_that_an_earlier_execution_has_set_is_missed_and_written_again() {
    let scene = Scene::new(1);
    third_execution(&scene.provider("worker").await).await;
    let doctor = scene.provider("doctor").await;
    assert_eq!(diagnose(&doctor, "i").await.findings, []);
    let values = scene.of_kind("i", "kv").await;
    assert_eq!(values.len(), 2, "{values:?}");
    for value in &values {
        take_away(&scene, value).await;
        repaired(&doctor, "i", Reason::LostValue).await;
    }
    let other = scene.provider("other").await;
    other.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let (item, ..) = next_turn(&other, LONG).await;
    let mut snapshot: Vec<_> =
        item.kv_snapshot.iter().map(|(key, entry)| (key.as_str(), entry.value.as_str())).collect();
    snapshot.sort_unstable();
    assert_eq!(snapshot, [("both", "1"), ("old", "1")], "as the execution found them");
    assert_eq!(other.get_kv_value("i", "both").await.unwrap().as_deref(), Some("3"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_lost_of_an_earlier_execution_is_missed() {
    let scene = Scene::new(1);
    third_execution(&scene.provider("worker").await).await;
    let doctor = scene.provider("doctor").await;
    let of = |execution: u64| {
        let scene = &scene;
        async move {
            let mut documents = scene.of_kind("i", "history").await;
            documents.retain(|document| document["execution"] == execution);
            documents.sort_by_key(|document| document["first"].as_u64());
            documents
        }
    };
    // Either turn of the second execution. The first of them has cleared a value that the first execution has set: what
    // that one says of values counts no more.
    for turn in of(2).await {
        take_away(&scene, &turn).await;
        let detail = by_hand(&doctor, "i", Reason::LostHistory).await;
        assert!(detail.contains("execution 2"), "{detail}");
        put(&scene, &turn).await;
        assert_eq!(diagnose(&doctor, "i").await.findings, []);
    }
    // All of the first execution, with the document that says how it ended.
    for document in of(1).await.iter().chain(&[json!({ "instanceId": "i", "id": "x:1" })]) {
        take_away(&scene, document).await;
    }
    let detail = by_hand(&doctor, "i", Reason::LostHistory).await;
    assert!(detail.contains("1 of 3 executions"), "{detail}");
    // An execution that was pruned is not missed.
    let other = Scene::new(1);
    let provider = other.provider("worker").await;
    third_execution(&provider).await;
    let options = duroxide::providers::PruneOptions { keep_last: Some(2), ..Default::default() };
    assert_eq!(admin(&provider).prune_executions("i", options).await.unwrap().executions_deleted, 1);
    assert_eq!(diagnose(&other.provider("doctor").await, "i").await.findings, []);
}

// ------------------------------------------------------------------------------------------------------- false alarms

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_waits_for_an_event_is_not_idle() {
    let came = |id| event("i", 1, id, EventKind::ExternalEvent { name: "go".to_owned(), data: String::new() });
    let queued = |id| event("i", 1, id, EventKind::QueueEventDelivered { name: "go".to_owned(), data: String::new() });
    let takes = |id| event("i", 1, id, EventKind::QueueSubscribed { name: "go".to_owned() });
    let gave_up = |id, of, kind: fn(String) -> EventKind| {
        Event::with_event_id(id, "i", 1, Some(of), kind("dropped_future".to_owned()))
    };
    let wait_over = |id, of| gave_up(id, of, |reason| EventKind::ExternalSubscribedCancelled { reason });
    let queue_over = |id, of| gave_up(id, of, |reason| EventKind::QueueSubscriptionCancelled { reason });
    let cases: [(&str, Vec<Event>, bool); 8] = [
        ("the event came before the subscription", vec![came(2), waits_for(3, "go")], true),
        (
            "the wait was over when the event came",
            vec![waits_for(2, "go"), wait_over(3, 2), came(4), waits_for(5, "go")],
            true,
        ),
        (
            "the wait was over after the event came",
            vec![waits_for(2, "go"), came(3), wait_over(4, 2), waits_for(5, "go")],
            true,
        ),
        ("one of two events came", vec![waits_for(2, "go"), waits_for(3, "go"), came(4)], true),
        ("both came", vec![waits_for(2, "go"), came(3), waits_for(4, "go"), came(5)], false),
        ("a queue keeps what comes early", vec![queued(2), takes(3)], false),
        ("an event is no queue message", vec![came(2), takes(3)], true),
        ("a cancelled wait takes nothing from a queue", vec![takes(2), queue_over(3, 2), queued(4), takes(5)], false),
    ];
    for (what, events, waits) in cases {
        let scene = Scene::new(1);
        let provider = scene.provider("worker").await;
        first_turn(&provider, "i", events).await;
        let diagnosis = diagnose(&provider, "i").await;
        let expected = if waits { vec![] } else { vec![Reason::Idle] };
        assert_eq!(reasons(&diagnosis), expected, "{what}: {diagnosis:#?}");
        assert_eq!(diagnosis.state == "waits for event go", waits, "{what}: {}", diagnosis.state);
    }
}

/// An instance whose activity waits for a minute, and a member that has renewed its document a moment ago.
async fn waiting_activity(scene: &Scene, provider: &CosmosDBProvider, takes: Value) {
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let events = vec![started("i", 1), scheduled("i", 2)];
    commit(provider, &token, events, vec![activity("i", 2)], Vec::new(), running()).await.unwrap();
    let mut work = only(scene, "i", "activity").await;
    work["due"] = (now() - 60_000).into();
    put(scene, &work).await;
    for document in scene.partition("$d:fleet").await {
        take_away(scene, &document).await;
    }
    let slots = json!({ "from": 0, "to": 256 });
    let mut member = json!({ "id": "member:m", "instanceId": "$d:fleet", "type": "member", "member": "m", "owners": [],
                             "turns": { "need": ["0.1.0", "0.2.0"], "slots": slots } });
    if !takes.is_null() {
        member["activity"] = json!({ "need": takes, "slots": slots });
    }
    put(scene, &member).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_are_busy_are_not_said_to_be_missing() {
    let scene = Scene::new(1);
    let provider = scene.provider("worker").await;
    // A process whose workers are all busy has asked for no activity in the last minute.
    waiting_activity(&scene, &provider, Value::Null).await;
    let detail = by_hand(&provider, "i", Reason::Late).await;
    assert!(!detail.contains("no process runs activities") && detail.contains("busy"), "{detail}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_doctor_whose_clock_is_ahead_judges_by_the_service_s_time() {
    let scene = Scene::new(1);
    let provider = scene.provider("worker").await;
    let ahead = scene.provider_with("doctor", quiet().with_clock(off_by(2 * HOUR as i64))).await;
    let takes = json!({ "any": false, "untagged": true, "tags": [] });
    waiting_activity(&scene, &provider, takes).await;
    let detail = by_hand(&ahead, "i", Reason::Late).await;
    assert!(detail.contains("1 processes could take it"), "the member has just been heard of: {detail}");
    // A message of a moment ago is not late, and a turn that is under way stays its worker's.
    take_away(&scene, &only(&scene, "i", "activity").await).await;
    provider.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let diagnosis = diagnose(&ahead, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::LostActivity], "{diagnosis:#?}");
    let (_, token, _) = next_turn(&provider, LONG).await;
    let repair = repair(&ahead, &diagnosis).await;
    assert!(repair.done.is_empty(), "{repair:#?}");
    assert!(repair.hindered.as_deref().is_some_and(|why| why.contains("a turn is under way")), "{repair:#?}");
    commit(&provider, &token, vec![note("i", 1, 3)], Vec::new(), Vec::new(), running())
        .await
        .expect("the lock is its own");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_doctor_whose_clock_is_ahead_writes_can_be_taken_at_once() {
    let scene = Scene::new(1);
    let provider = scene.provider("worker").await;
    let ahead = scene.provider_with("doctor", quiet().with_clock(off_by(2 * HOUR as i64))).await;
    first_turn(&provider, "i", vec![scheduled("i", 2)]).await;
    repaired(&ahead, "i", Reason::LostActivity).await;
    let (item, ..) = next_work(&scene.provider("other").await, LONG).await;
    assert_eq!(item, activity("i", 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_doctor_that_may_not_write_diagnoses_all_the_same() {
    let scene = Scene::new(1);
    let provider = scene.provider("worker").await;
    first_turn(&provider, "i", vec![scheduled("i", 2)]).await;
    let reader = scene.provider("reader").await;
    let refused =
        WireRule::new(WireAction::Refuse { status: 403, substatus: Some(5302), retry_after: None }).client("reader");
    scene
        .account
        .wire()
        .add(refused.matching(|request| matches!(request.kind, RequestKind::Upsert | RequestKind::Create)));
    assert_eq!(reasons(&diagnose(&reader, "i").await), [Reason::LostActivity]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_between_two_executions_has_not_ended_and_its_lost_start_is_found() {
    let scene = Scene::new(1);
    let worker = scene.provider_with("worker", quiet().with_inline_claims(false)).await;
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let continued = EventKind::OrchestrationContinuedAsNew { input: "{}".to_owned() };
    let events = vec![started("i", 1), event("i", 1, 2, continued)];
    commit(&worker, &token, events, Vec::new(), vec![again("i")], ended("ContinuedAsNew")).await.unwrap();
    let diagnosis = diagnose(&worker, "i").await;
    assert!(!diagnosis.state.starts_with("has ended"), "{diagnosis:#?}");
    take_away(&scene, &scene.of_kind("i", "message").await[0]).await;
    // Another start of the same id begins no execution of this instance.
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let diagnosis = diagnose(&worker, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::LostContinuation], "{diagnosis:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_whose_parent_can_not_be_read_is_no_orphan() {
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    begin(&worker, "parent", Vec::new(), Vec::new()).await;
    worker.enqueue_for_orchestrator(start_child("child", Some("parent")), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let metadata = ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..running() };
    commit(&worker, &token, vec![started("child", 1)], Vec::new(), Vec::new(), metadata).await.unwrap();
    let mut parent = scene.of_kind("parent", "instance").await.remove(0);
    parent["execution"] = json!("one");
    put(&scene, &parent).await;
    let doctor = scene.provider("doctor").await;
    let diagnosis = diagnose(&doctor, "child").await;
    assert!(!reasons(&diagnosis).contains(&Reason::Orphan), "{diagnosis:#?}");
}
