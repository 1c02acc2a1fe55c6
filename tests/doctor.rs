//! The doctor: whatever is taken away from an instance is named, and what its history tells is mended.

#[path = "common/scene.rs"]
mod scene;

use duroxide::{
    providers::{Provider, TagFilter, WorkItem},
    runtime::{registry::ActivityRegistry, Runtime},
    ActivityContext, Client, EventKind, OrchestrationContext, OrchestrationRegistry, OrchestrationStatus,
    RuntimeOptions,
};
use duroxide_cosmos::{
    operate::{Diagnosis, Reason, Remedy, Repair},
    CosmosDBProvider,
};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use scene::*;
use serde_json::{json, Value};
use std::{sync::Arc, time::Duration};

const PARENT: &str = "everything";
const CHILD: &str = "its child";
const HOUR: i64 = 3_600_000;

/// An orchestration that waits for one of each, in its second execution, and what it needs.
async fn run(provider: CosmosDBProvider, tags: TagFilter) -> Arc<Runtime> {
    let activities = ActivityRegistry::builder()
        .register("Work", |_: ActivityContext, input: String| async move { Ok(input.len().to_string()) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Everything", |ctx: OrchestrationContext, input: String| async move {
            if input == "first" {
                ctx.set_custom_status("begun");
                return ctx.continue_as_new("second").await;
            }
            ctx.set_kv_value("total", "42");
            ctx.set_custom_status("waiting");
            let activity = ctx.schedule_activity("Work", "x".repeat(8_000)).with_tag("later");
            let child = ctx.schedule_sub_orchestration_with_id("Child", CHILD, "");
            let timer = ctx.schedule_timer(Duration::from_secs(3_600));
            let (length, child) = (activity.await?, child.await?);
            timer.await;
            Ok(format!("{length} {child} {}", ctx.get_kv_value("total").unwrap_or_default()))
        })
        .register("Child", |ctx: OrchestrationContext, _: String| async move { Ok(ctx.schedule_wait("go").await) })
        .build();
    let options = RuntimeOptions { worker_tag_filter: tags, ..RuntimeOptions::default() };
    Runtime::start_with_options(Arc::new(provider), activities, orchestrations, options).await
}

/// The documents of such an instance and its child while both wait, all of them.
async fn everything() -> Vec<Value> {
    let scene = Scene::new(1);
    let runtime = run(scene.provider("worker").await, TagFilter::DefaultOnly).await;
    let client = Client::new(Arc::new(scene.provider("client").await));
    client.start_orchestration(PARENT, "Everything", "first").await.unwrap();
    // Its child has had its first turn, and nothing is under way.
    loop {
        let waits = |of: &[Value], kind: &str| of.iter().filter(|document| document["type"] == kind).count() == 1;
        let (parent, child) = (scene.partition(PARENT).await, scene.partition(CHILD).await);
        let locked =
            parent.iter().chain(&child).any(|document| document["type"] == "instance" && !document["lock"].is_null());
        let running = child.iter().any(|document| document["status"] == "Running");
        if !locked
            && running
            && waits(&parent, "activity")
            && !parent.iter().any(|document| document["type"] == "intent")
        {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    runtime.shutdown(None).await;
    let all = scene.documents().await;
    all.into_iter().filter(|document| [PARENT, CHILD].iter().any(|of| document["instanceId"] == *of)).collect()
}

async fn put(scene: &Scene, document: &Value) {
    let own = document.as_object().unwrap().iter().filter(|(key, _)| !key.starts_with('_'));
    let own: Value = own.map(|(key, value)| (key.clone(), value.clone())).collect();
    let partition = own["instanceId"].as_str().unwrap().to_owned();
    scene.container().await.upsert_item(partition, own["id"].as_str().unwrap(), &own, None).await.unwrap();
}

/// Makes everything of a kind so many milliseconds older.
async fn age(scene: &Scene, instance: &str, kind: &str, field: &str, by: i64) {
    for mut document in scene.of_kind(instance, kind).await {
        document[field] = json!(document[field].as_i64().unwrap() - by);
        put(scene, &document).await;
    }
}

async fn take_away(scene: &Scene, document: &Value) {
    let partition = document["instanceId"].as_str().unwrap().to_owned();
    scene.container().await.delete_item(partition, document["id"].as_str().unwrap(), None).await.unwrap();
}

async fn diagnose(provider: &CosmosDBProvider, instance: &str) -> Diagnosis {
    provider.doctor().await.unwrap().diagnose(instance).await.unwrap().expect("something of that name")
}

async fn repair(provider: &CosmosDBProvider, diagnosis: &Diagnosis) -> Repair {
    provider.doctor().await.unwrap().repair(diagnosis).await.unwrap()
}

fn reasons(diagnosis: &Diagnosis) -> Vec<Reason> {
    diagnosis.findings.iter().map(|finding| finding.reason).collect()
}

/// Finds just this, mends it, and is well after that.
async fn mended(provider: &CosmosDBProvider, instance: &str, reason: Reason) {
    let diagnosis = diagnose(provider, instance).await;
    assert_eq!(reasons(&diagnosis), [reason], "{diagnosis:#?}");
    assert!(matches!(diagnosis.findings[0].remedy, Remedy::Repair(_)), "{diagnosis:#?}");
    let repair = repair(provider, &diagnosis).await;
    assert_eq!((repair.done.len(), repair.hindered.as_deref()), (1, None), "{repair:#?}");
    assert_eq!(repair.after.expect("it is there").findings, [], "well after that");
}

/// Finds just this, and can't mend it.
async fn by_hand(provider: &CosmosDBProvider, instance: &str, reason: Reason) {
    let diagnosis = diagnose(provider, instance).await;
    assert_eq!(reasons(&diagnosis), [reason], "{diagnosis:#?}");
    assert!(matches!(diagnosis.findings[0].remedy, Remedy::ByHand(_)) && !diagnosis.can_be_repaired());
    let repair = repair(provider, &diagnosis).await;
    assert!(repair.done.is_empty(), "{repair:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_taken_away_is_named_and_what_the_history_tells_is_made_again() {
    let everything = everything().await;
    let kinds = |of: &str, kind: &str| {
        everything.iter().filter(|document| document["instanceId"] == of && document["type"] == kind).count()
    };
    for kind in ["instance", "execution", "kv", "customStatus", "activity", "payload", "message"] {
        assert_eq!(kinds(PARENT, kind), 1, "{kind}");
    }
    assert_eq!((kinds(CHILD, "instance"), kinds(CHILD, "delivered"), kinds(CHILD, "history")), (1, 1, 1));
    let mut ran = 0;
    for missing in std::iter::once(&Value::Null).chain(&everything) {
        let scene = Scene::new(1);
        // Late enough for the timer, and the work is late.
        let doctor = scene.provider("doctor").await;
        for document in everything.iter().filter(|document| *document != missing) {
            put(&scene, document).await;
        }
        let of = missing["instanceId"].as_str().unwrap_or(PARENT);
        let is_current = missing["execution"] == json!(2) || of == CHILD;
        // Whether it goes on from there.
        let goes_on = match missing["type"].as_str() {
            None | Some("delivered") => {
                for instance in [PARENT, CHILD] {
                    let diagnosis = diagnose(&doctor, instance).await;
                    assert_eq!(diagnosis.findings, [], "{instance} {missing}");
                    assert!(diagnosis.state.starts_with("waits for"), "{}", diagnosis.state);
                }
                true
            }
            Some("history") => {
                by_hand(&doctor, of, Reason::LostHistory).await;
                !is_current
            }
            Some(kind) => {
                if (of, kind) == (CHILD, "instance") {
                    by_hand(&doctor, PARENT, Reason::LostChild).await;
                }
                let reason = match kind {
                    "instance" => Reason::LostInstance,
                    "execution" => Reason::LostExecution,
                    "kv" => Reason::LostValue,
                    "customStatus" => Reason::LostStatus,
                    "activity" => Reason::LostActivity,
                    "payload" => Reason::LostInput,
                    "message" => Reason::LostTimer,
                    other => panic!("{other} is no kind that an instance has"),
                };
                mended(&doctor, of, reason).await;
                true
            }
        };
        if goes_on {
            ran += 1;
            run_to_the_end(&scene).await;
        }
    }
    assert!(ran >= 10, "{ran}");
}

/// A worker that takes all of it, later.
async fn run_to_the_end(scene: &Scene) {
    let later = scene.provider_with("later", quiet().with_clock(off_by(2 * HOUR))).await;
    let runtime = run(later, TagFilter::default_and(["later"])).await;
    let store = Arc::new(scene.provider("client").await);
    let client = Client::new(store.clone());
    client.raise_event(CHILD, "go", "gone").await.unwrap();
    match client.wait_for_orchestration(PARENT, PATIENCE).await.unwrap() {
        OrchestrationStatus::Completed { output, custom_status, .. } => {
            assert_eq!((output.as_str(), custom_status.as_deref()), ("8000 gone 42", Some("waiting")));
        }
        other => panic!("{other:?}"),
    }
    let info = admin(&store).get_execution_info(PARENT, 1).await.unwrap();
    assert_eq!((info.status.as_str(), info.output.as_deref()), ("ContinuedAsNew", Some("second")));
    runtime.shutdown(None).await;
    // An intent is deleted in the background once its message has arrived.
    let passing = ["message", "activity", "payload", "intent"];
    let mut left = Vec::new();
    let emptied = async {
        loop {
            left = scene.documents().await;
            left.retain(|document| passing.iter().any(|kind| document["type"] == *kind));
            if left.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, emptied).await.is_ok();
    assert!(in_time, "{left:?} is left over");
}

fn event_of(instance: &str, id: u64, kind: EventKind) -> duroxide::Event {
    event(instance, 1, id, kind)
}

fn scheduled_child(instance: &str, child: &str) -> duroxide::Event {
    let kind = EventKind::SubOrchestrationScheduled {
        name: "Orchestration".to_owned(),
        instance: child.to_owned(),
        input: "{}".to_owned(),
    };
    event_of(instance, 2, kind)
}

fn scheduled_activity(instance: &str, id: u64) -> duroxide::Event {
    let kind = EventKind::ActivityScheduled {
        name: "Activity".to_owned(),
        input: "{}".to_owned(),
        session_id: None,
        tag: None,
    };
    event_of(instance, id, kind)
}

/// A parent that has started a child, with the event that says so.
async fn parent_and_child(provider: &CosmosDBProvider) {
    provider.enqueue_for_orchestrator(start("parent"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let events = vec![started("parent", 1), scheduled_child("parent", "child")];
    commit(provider, &token, events, Vec::new(), vec![start_child("child", Some("parent"))], running()).await.unwrap();
}

async fn message_of(scene: &Scene, instance: &str) -> Value {
    let mut messages = scene.of_kind(instance, "message").await;
    assert_eq!(messages.len(), 1, "{messages:?}");
    messages.remove(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_was_lost_is_started_again_and_an_end_that_was_lost_is_told() {
    let scene = Scene::new(1);
    let (provider, doctor) =
        (scene.provider_with("worker", quiet().with_inline_claims(false)).await, scene.provider("doctor").await);
    parent_and_child(&provider).await;
    assert_eq!(diagnose(&doctor, "parent").await.findings, [], "its start is on the way");
    take_away(&scene, &message_of(&scene, "child").await).await;
    mended(&doctor, "parent", Reason::LostChild).await;
    // One that does not remember what was lost.
    let provider = scene.provider_with("other", quiet().with_inline_claims(false)).await;
    let (item, token, _) = next_turn(&provider, LONG).await;
    assert_eq!(item.instance, "child");
    let [WorkItem::StartOrchestration { parent_instance, parent_id, .. }] = item.messages.as_slice() else {
        panic!("{:?}", item.messages);
    };
    assert_eq!((parent_instance.as_deref(), *parent_id), (Some("parent"), Some(2)));
    // It ends, and what it tells is lost.
    let end = WorkItem::SubOrchCompleted {
        parent_instance: "parent".to_owned(),
        parent_execution_id: 1,
        parent_id: 2,
        result: "done".to_owned(),
    };
    let metadata =
        duroxide::providers::ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..ended("Completed") };
    let events = vec![started("child", 1), completed("child", 1, 2)];
    commit(&provider, &token, events, Vec::new(), vec![end.clone()], metadata).await.unwrap();
    assert_eq!(diagnose(&doctor, "parent").await.findings, [], "its end waits in the queue");
    take_away(&scene, &message_of(&scene, "parent").await).await;
    mended(&doctor, "parent", Reason::LostEnd).await;
    let (item, ..) = next_turn(&scene.provider("third").await, LONG).await;
    assert_eq!((item.instance.as_str(), item.messages), ("parent", vec![end]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_is_on_its_way_to_a_child_that_has_ended_is_answered_by_nobody_else() {
    let scene = Scene::new(1);
    let provider = scene.provider_with("worker", quiet().with_inline_claims(false)).await;
    parent_and_child(&provider).await;
    let (_, token, _) = next_turn(&provider, LONG).await;
    let metadata =
        duroxide::providers::ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..ended("Completed") };
    let child = |parent_id| {
        let mut event = started("child", 1);
        let EventKind::OrchestrationStarted { parent_instance, parent_id: of, .. } = &mut event.kind else {
            panic!("it is started");
        };
        (*parent_instance, *of) = (Some("parent".to_owned()), Some(parent_id));
        event
    };
    let events = vec![child(2), completed("child", 1, 2)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
    let again = scene.provider("again").await;
    again.enqueue_for_orchestrator(start_child("child", Some("parent")), None).await.unwrap();
    assert_eq!(diagnose(&provider, "parent").await.findings, [], "the child has yet to say that it is there already");
    take_away(&scene, &message_of(&scene, "child").await).await;
    let diagnosis = diagnose(&provider, "parent").await;
    assert_eq!(reasons(&diagnosis), [Reason::LostEnd]);
    assert!(diagnosis.can_be_repaired());
    // Another event of the parent's has started that child: its end is no answer to this one.
    let mut history = scene.of_kind("child", "history").await.remove(0);
    let text = history["events"][0].as_str().unwrap().replace("\"parent_id\":2", "\"parent_id\":7");
    history["events"][0] = json!(text);
    put(&scene, &history).await;
    by_hand(&provider, "parent", Reason::LostEnd).await;
    // A child that was failed since its history can't be read told nobody: it is told for it.
    history["events"][0] = json!("garbage");
    put(&scene, &history).await;
    let mut document = scene.of_kind("child", "instance").await.remove(0);
    (document["status"], document["output"]) = (json!("Failed"), json!("poisoned"));
    put(&scene, &document).await;
    mended(&provider, "parent", Reason::LostEnd).await;
    let (item, ..) = next_turn(&scene.provider("other").await, LONG).await;
    let [WorkItem::SubOrchFailed { parent_id: 2, details, .. }] = item.messages.as_slice() else {
        panic!("{:?}", item.messages);
    };
    assert!(details.display_message().contains("poisoned"), "{details:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_is_not_made_from_a_part_of_its_history_and_keeps_its_birth() {
    let scene = Scene::new(1);
    let provider = scene.provider_with("worker", quiet().with_inline_claims(false)).await;
    parent_and_child(&provider).await;
    let document = scene.of_kind("parent", "instance").await.remove(0);
    take_away(&scene, &document).await;
    let history = scene.of_kind("parent", "history").await.remove(0);
    // Not where something tells of more.
    let hints = [
        json!({ "id": "s:key:0", "instanceId": "parent", "type": "staged", "operations": [] }),
        json!({ "id": "w:1:9", "instanceId": "parent", "type": "activity", "due": 1, "seq": "1", "item": "{}" }),
        json!({ "id": "h:1:other:0", "instanceId": "parent", "type": "history", "execution": 1, "first": 9, "events": 7 }),
    ];
    for hint in &hints {
        put(&scene, hint).await;
        let diagnosis = diagnose(&provider, "parent").await;
        assert!(reasons(&diagnosis).contains(&Reason::LostInstance), "{diagnosis:#?}");
        assert!(!diagnosis.can_be_repaired(), "{diagnosis:#?}");
        take_away(&scene, hint).await;
    }
    let mut gap = history.clone();
    gap["events"].as_array_mut().unwrap().remove(0);
    put(&scene, &gap).await;
    by_hand(&provider, "parent", Reason::LostInstance).await;
    put(&scene, &history).await;
    // The start in the child's queue knows which of its name has sent it.
    mended(&provider, "parent", Reason::LostInstance).await;
    let made = scene.of_kind("parent", "instance").await.remove(0);
    for field in ["incarnation", "execution", "status", "name", "version", "events", "totals", "epoch", "turn"] {
        assert_eq!(made[field], document[field], "{field}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_execution_that_nothing_continues_goes_on_with_what_its_queues_had() {
    let scene = Scene::new(1);
    let provider = scene.provider_with("worker", quiet().with_inline_claims(false)).await;
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let queue = |id, name: &str, data: &str| {
        let kind = EventKind::QueueEventDelivered { name: name.to_owned(), data: data.to_owned() };
        event_of("i", id, kind)
    };
    let events = vec![
        started("i", 1),
        event_of("i", 2, EventKind::QueueSubscribed { name: "q".to_owned() }),
        queue(3, "q", "heard"),
        queue(4, "q", "not heard"),
        event_of("i", 5, EventKind::CustomStatusUpdated { status: Some("half".to_owned()) }),
        event_of("i", 6, EventKind::OrchestrationContinuedAsNew { input: "next".to_owned() }),
    ];
    commit(&provider, &token, events, Vec::new(), vec![again("i")], ended("ContinuedAsNew")).await.unwrap();
    assert_eq!(diagnose(&provider, "i").await.findings, []);
    take_away(&scene, &message_of(&scene, "i").await).await;
    mended(&scene.provider("doctor").await, "i", Reason::LostContinuation).await;
    // What was remembered of the one that is lost is disproved by the claim.
    let (item, ..) = next_turn(&scene.provider("other").await, LONG).await;
    let [WorkItem::ContinueAsNew { input, orchestration, carry_forward_events, initial_custom_status, .. }] =
        item.messages.as_slice()
    else {
        panic!("{:?}", item.messages)
    };
    assert_eq!((input.as_str(), orchestration.as_str()), ("next", "Orchestration"));
    assert_eq!(carry_forward_events, &[("q".to_owned(), "not heard".to_owned())]);
    assert_eq!(initial_custom_status.as_deref(), Some("half"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_belong_goes_and_what_is_not_ours_stays() {
    let scene = Scene::new(1);
    let provider = scene.provider("worker").await;
    begin(&provider, "i", Vec::new(), Vec::new()).await;
    let by_hand_only = diagnose(&provider, "i").await;
    assert_eq!(reasons(&by_hand_only), [Reason::Idle], "nothing was scheduled: {by_hand_only:#?}");
    // An event that it waited for has come: it waits for nothing again.
    provider.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let came = EventKind::ExternalEvent { name: "note 2".to_owned(), data: String::new() };
    commit(&provider, &token, vec![note("i", 1, 2), event_of("i", 3, came)], Vec::new(), Vec::new(), running())
        .await
        .unwrap();
    by_hand(&provider, "i", Reason::Idle).await;
    let strays = [
        json!({ "id": "w:1:9", "instanceId": "i", "type": "activity", "due": 1, "seq": "1", "item": "{}" }),
        json!({ "id": "p:w:1:9", "instanceId": "i", "type": "payload", "item": "{}" }),
        json!({ "id": "s:dead:0", "instanceId": "i", "type": "staged", "operations": [] }),
    ];
    for document in &strays {
        put(&scene, document).await;
    }
    put(&scene, &json!({ "id": "note", "instanceId": "i", "text": "remember the milk" })).await;
    let diagnosis = diagnose(&provider, "i").await;
    let strays = |diagnosis: &Diagnosis| reasons(diagnosis).iter().filter(|reason| **reason == Reason::Stray).count();
    assert_eq!(strays(&diagnosis), 4, "{diagnosis:#?}");
    let done = repair(&provider, &diagnosis).await;
    assert_eq!(done.done.len(), 3, "{done:#?}");
    assert_eq!(strays(&done.after.unwrap()), 1);
    let left: Vec<String> = scene.partition("i").await.iter().map(|document| document["type"].to_string()).collect();
    assert_eq!(left.iter().filter(|kind| *kind == "null").count(), 1, "{left:?}");
    assert_eq!(left.len(), 4, "the instance, its history of two turns, the note: {left:?}");
    // Activities of nobody.
    put(
        &scene,
        &json!({ "id": "w:1:2", "instanceId": "nobody", "type": "activity", "due": 1, "seq": "1", "item": "{}" }),
    )
    .await;
    let diagnosis = diagnose(&provider, "nobody").await;
    assert!(reasons(&diagnosis).contains(&Reason::Stray));
    let done = repair(&provider, &diagnosis).await;
    assert!(done.after.is_none() && scene.partition("nobody").await.is_empty(), "{done:#?}");
    assert!(provider.doctor().await.unwrap().diagnose("nobody").await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_t_be_read_is_named_and_an_activity_is_made_again() {
    let scene = Scene::new(1);
    let provider = scene.provider("worker").await;
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let events = vec![started("i", 1), scheduled_activity("i", 2)];
    commit(&provider, &token, events, vec![activity("i", 2)], Vec::new(), running()).await.unwrap();
    put(&scene, &json!({ "id": "w:1:2", "instanceId": "i", "type": "activity", "due": "soon" })).await;
    put(&scene, &json!({ "id": "m:x", "instanceId": "i", "type": "message", "due": 1, "seq": "1", "createdAt": 1, "item": "garbage" }))
        .await;
    let doctor = scene.provider("doctor").await;
    let diagnosis = diagnose(&doctor, "i").await;
    let mut found = reasons(&diagnosis);
    found.sort();
    assert_eq!(found, [Reason::LostActivity, Reason::Late, Reason::Unreadable, Reason::Unreadable], "{diagnosis:#?}");
    // What can't be read may be the end of the activity.
    assert!(!diagnosis.can_be_repaired(), "{diagnosis:#?}");
    take_away(&scene, &json!({ "id": "m:x", "instanceId": "i" })).await;
    let mut held = json!({ "id": "w:1:2", "instanceId": "i", "type": "activity", "due": "soon" });
    held["lock"] = json!({ "token": "newer", "until": 9_000_000_000_000_000u64 });
    put(&scene, &held).await;
    by_hand(&doctor, "i", Reason::Unreadable).await;
    held["lock"]["until"] = json!(1);
    put(&scene, &held).await;
    let diagnosis = diagnose(&doctor, "i").await;
    let done = repair(&doctor, &diagnosis).await;
    assert_eq!(done.done.len(), 1, "{done:#?}");
    // Its text alone can't be read.
    let mut work = scene.of_kind("i", "activity").await.remove(0);
    work["item"] = json!("garbage");
    put(&scene, &work).await;
    mended(&doctor, "i", Reason::LostInput).await;
    let (item, ..) = next_work(&scene.provider("other").await, LONG).await;
    assert_eq!(
        item,
        WorkItem::ActivityExecute {
            instance: "i".to_owned(),
            execution_id: 1,
            id: 2,
            name: "Activity".to_owned(),
            input: "{}".to_owned(),
            session_id: None,
            tag: None,
        }
    );
    // The one document that nothing can do without.
    put(&scene, &json!({ "id": "instance", "instanceId": "i", "type": "instance", "execution": "many" })).await;
    let diagnosis = diagnose(&doctor, "i").await;
    assert!(!diagnosis.can_be_repaired() && reasons(&diagnosis).contains(&Reason::Unreadable), "{diagnosis:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_left_half_way_is_gone_on_with() {
    let scene = Scene::new(1);
    let (provider, late) = (scene.provider("worker").await, scene.provider("late").await);
    begin(&provider, "i", Vec::new(), Vec::new()).await;
    let instance = || async { scene.of_kind("i", "instance").await.remove(0) };
    // A committed turn, one part of which is not applied.
    let part = json!({ "op": "create", "document": { "id": "k:a", "instanceId": "i", "type": "kv", "key": "a", "value": "1", "epoch": 0 } });
    let staged = json!({ "id": "s:key:1", "instanceId": "i", "type": "staged", "operations": [part] });
    let mut half = instance().await;
    half["rollForward"] = json!({ "key": "key", "parts": 2, "next": 1 });
    half["due"] = json!(1);
    put(&scene, &half).await;
    by_hand(&late, "i", Reason::HalfCommitted).await;
    put(&scene, &staged).await;
    let diagnosis = diagnose(&late, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::HalfCommitted], "{diagnosis:#?}");
    let done = repair(&late, &diagnosis).await;
    assert_eq!(done.done.len(), 1, "{done:#?}");
    assert!(scene.of_kind("i", "staged").await.is_empty() && instance().await["rollForward"].is_null());
    assert_eq!(scene.of_kind("i", "kv").await.len(), 1);
    // A deletion of which its coordinator knows nothing.
    let mut marked = instance().await;
    marked["deleting"] = json!({ "plan": "p", "coordinator": "gone", "before": "0" });
    marked["due"] = json!(1);
    put(&scene, &marked).await;
    let diagnosis = diagnose(&late, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::HalfDeleted], "{diagnosis:#?}");
    let done = repair(&late, &diagnosis).await;
    assert_eq!(done.done.len(), 1, "{done:#?}");
    assert!(instance().await["deleting"].is_null());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_missing_is_said_where_nobody_takes_what_waits() {
    let scene = Scene::new(1);
    let provider = scene.provider("worker").await;
    let late = scene.provider("late").await;
    let detail = |diagnosis: &Diagnosis| {
        diagnosis.findings.iter().map(|finding| finding.detail.clone()).collect::<Vec<_>>().join("; ")
    };
    provider.enqueue_for_orchestrator(start("turn"), None).await.unwrap();
    age(&scene, "turn", "message", "due", 40_000).await;
    let diagnosis = diagnose(&late, "turn").await;
    assert_eq!(reasons(&diagnosis), [Reason::Late]);
    assert!(detail(&diagnosis).contains("no process takes turns"), "{diagnosis:#?}");
    // An expired lock, of a version that nobody has.
    let provider = scene.provider("other").await;
    let (_, token, _) = next_turn(&provider, LONG).await;
    let events = vec![started("turn", 1), scheduled_activity("turn", 2), scheduled_activity("turn", 3)];
    let metadata = duroxide::providers::ExecutionMetadata {
        pinned_duroxide_version: Some(semver::Version::new(9, 0, 0)),
        ..running()
    };
    let work = vec![activity_with("turn", 2, None, Some("gpu")), activity_with("turn", 3, Some("cart"), None)];
    commit(&provider, &token, events, work, Vec::new(), metadata).await.unwrap();
    let member = |owners: Value| {
        let slots = json!({ "from": 0, "to": 256 });
        json!({ "id": "member:m", "instanceId": "$d:fleet", "type": "member", "member": "m", "owners": owners,
                "turns": { "need": ["0.1.0", "0.2.0"], "slots": slots },
                "activity": { "need": { "any": false, "untagged": true, "tags": [] }, "slots": slots } })
    };
    for document in scene.partition("$d:fleet").await {
        take_away(&scene, &document).await;
    }
    put(&scene, &member(json!(["somebody"]))).await;
    let mut locked = scene.of_kind("turn", "instance").await.remove(0);
    locked["lock"] = json!({ "token": "dead", "until": 1 });
    put(&scene, &locked).await;
    provider.enqueue_for_orchestrator(external("turn", "x"), None).await.unwrap();
    age(&scene, "turn", "message", "due", 40_000).await;
    age(&scene, "turn", "activity", "due", 40_000).await;
    let held = |owner: &str| {
        json!({ "id": "session", "instanceId": "$s:cart", "type": "session", "sessionId": "cart", "owner": owner,
                "lockedUntil": 9_000_000_000_000_000u64, "lastActivity": 1 })
    };
    put(&scene, &held("somebody")).await;
    let diagnosis = diagnose(&late, "turn").await;
    assert_eq!(reasons(&diagnosis), [Reason::Late; 3], "{diagnosis:#?}");
    let said = detail(&diagnosis);
    assert!(
        said.contains("with a lock that has expired: it is pinned to duroxide 9.0.0, which none of 1 processes runs"),
        "{said}"
    );
    assert!(said.contains("no process runs activities with tag \"gpu\""), "{said}");
    assert!(said.contains("of session \"cart\"") && said.contains("its session is \"somebody\"'s"), "{said}");
    put(&scene, &held("a stranger")).await;
    let said = detail(&diagnose(&late, "turn").await);
    assert!(said.contains("no process that is there is called that"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_whose_parent_is_gone_is_an_orphan_and_a_message_that_is_not_delivered_is_named() {
    let scene = Scene::new(1);
    let provider = scene.provider_with("worker", quiet().with_inline_claims(false)).await;
    parent_and_child(&provider).await;
    let (_, token, _) = next_turn(&provider, LONG).await;
    let metadata =
        duroxide::providers::ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..running() };
    let events = vec![started("child", 1), note("child", 1, 2)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
    assert_eq!(diagnose(&provider, "child").await.findings, []);
    let mut parent = scene.of_kind("parent", "instance").await.remove(0);
    parent["incarnation"] = json!("another");
    put(&scene, &parent).await;
    by_hand(&provider, "child", Reason::Orphan).await;
    by_hand(&provider, "parent", Reason::LostChild).await;
    take_away(&scene, &parent).await;
    by_hand(&provider, "child", Reason::Orphan).await;
    let intent = json!({ "id": "i:t:0", "instanceId": "child", "type": "intent", "createdAt": 1, "target": "x", "document": {},
                         "poisoned": "too large" });
    put(&scene, &intent).await;
    let found = reasons(&diagnose(&provider, "child").await);
    assert_eq!(found, [Reason::Orphan, Reason::Undelivered]);
}

/// An instance whose activity was lost.
async fn with_a_lost_activity(scene: &Scene, provider: &CosmosDBProvider) {
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let events = vec![started("i", 1), scheduled_activity("i", 2)];
    commit(provider, &token, events, vec![activity("i", 2)], Vec::new(), running()).await.unwrap();
    take_away(scene, &scene.of_kind("i", "activity").await.remove(0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_mended_while_a_turn_is_under_way_nor_what_has_moved_since() {
    let scene = Scene::new(1);
    let (provider, doctor) = (scene.provider("worker").await, scene.provider("doctor").await);
    with_a_lost_activity(&scene, &provider).await;
    let diagnosis = diagnose(&doctor, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::LostActivity]);
    provider.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let hindered = repair(&doctor, &diagnosis).await;
    assert!(hindered.done.is_empty() && hindered.hindered.unwrap().contains("a turn is under way"));
    assert!(scene.of_kind("i", "activity").await.is_empty());
    // The turn hears of the end of the activity in another way: there is nothing to mend any more.
    let kind = EventKind::ActivityCompleted { result: "done".to_owned() };
    let heard = duroxide::Event::with_event_id(3, "i", 1, Some(2), kind);
    commit(&provider, &token, vec![heard, note("i", 1, 4)], Vec::new(), Vec::new(), running()).await.unwrap();
    let nothing = repair(&doctor, &diagnosis).await;
    assert!(nothing.done.is_empty() && nothing.hindered.is_none(), "{nothing:#?}");
    assert_eq!((nothing.after.unwrap().findings, scene.of_kind("i", "activity").await.len()), (vec![], 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_depends_on_the_instance_being_as_it_was_looked_at() {
    let scene = Scene::new(1);
    let (provider, doctor) = (scene.provider("worker").await, scene.provider("doctor").await);
    with_a_lost_activity(&scene, &provider).await;
    let diagnosis = diagnose(&doctor, "i").await;
    // Its batch waits until a turn was claimed and committed that no longer waits for the activity.
    let gate = Gate::new();
    let held = WireRule::new(WireAction::HoldBefore(gate.clone())).client("doctor").on(RequestKind::Batch);
    scene.account.wire().add(held);
    let mending = tokio::spawn(async move { repair(&doctor, &diagnosis).await });
    gate.reached().await;
    provider.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let cancelled = EventKind::ActivityCancelRequested { reason: "dropped".to_owned() };
    let events = vec![duroxide::Event::with_event_id(3, "i", 1, Some(2), cancelled), note("i", 1, 4)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
    gate.open();
    let repair = mending.await.unwrap();
    assert!(repair.done.is_empty(), "{repair:#?}");
    assert!(scene.of_kind("i", "activity").await.is_empty(), "an activity that was cancelled is not scheduled again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_that_is_cut_anywhere_is_finished_by_the_next() {
    for lost_answer in [false, true] {
        for passing in 0.. {
            let scene = Scene::new(1);
            let (provider, doctor) = (scene.provider("worker").await, scene.provider("doctor").await);
            with_a_lost_activity(&scene, &provider).await;
            let diagnosis = diagnose(&doctor, "i").await;
            let cut = if lost_answer { scene.cut_after("doctor", passing) } else { scene.cut("doctor", passing) };
            let ended = until_cut(repair(&doctor, &diagnosis), &cut).await;
            let again = scene.provider("again").await;
            let diagnosis = diagnose(&again, "i").await;
            repair(&again, &diagnosis).await;
            assert_eq!(diagnose(&again, "i").await.findings, [], "cut after {passing}");
            let (_, token, attempt) = next_work(&scene.provider("other").await, LONG).await;
            assert_eq!((attempt, scene.of_kind("i", "activity").await.len()), (1, 1), "cut after {passing}");
            drop(token);
            if let Ended::Returned(_) = ended {
                assert!(passing > 3, "a repair has more than {passing} requests");
                break;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_that_stand_still_are_found_and_those_without_a_document_where_all_are_asked_for() {
    let scene = Scene::new(3);
    let provider = scene.provider("worker").await;
    let later = scene.provider("later").await;
    for n in 0..3 {
        begin(&provider, &format!("still {n}"), Vec::new(), Vec::new()).await;
        age(&scene, &format!("still {n}"), "instance", "updatedAt", HOUR).await;
    }
    finish(&provider, "ended", None).await;
    finish(&provider, "headless", None).await;
    take_away(&scene, &scene.of_kind("headless", "instance").await.remove(0)).await;
    provider.enqueue_for_orchestrator(start("waits"), None).await.unwrap();
    age(&scene, "waits", "message", "due", HOUR).await;
    put(
        &scene,
        &json!({ "id": "m:e:x", "instanceId": "deferred", "type": "message", "due": 9_007_199_254_740_991u64, "seq": "1",
                         "createdAt": 1, "item": serde_json::to_string(&external("deferred", "x")).unwrap() }),
    )
    .await;
    let suspects = |unmoved: u64, all: bool| {
        let later = &later;
        async move {
            let mut suspects = later.doctor().await.unwrap().scan(Duration::from_secs(unmoved), all);
            let mut found = Vec::new();
            while let Some(page) = suspects.next().await.unwrap() {
                found.extend(page);
            }
            found.sort();
            found
        }
    };
    assert_eq!(suspects(60, false).await, ["still 0", "still 1", "still 2", "waits"]);
    assert_eq!(suspects(7_200, false).await, ["waits"], "they have moved since");
    assert_eq!(suspects(60, true).await, ["ended", "headless", "deferred", "still 0", "still 1", "still 2", "waits"]);
    mended(&later, "deferred", Reason::LostInstance).await;
    assert_eq!(scene.of_kind("deferred", "instance").await[0]["deferred"], true);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_that_run_are_well_whenever_they_are_looked_at() {
    const INSTANCES: usize = 30;
    let scene = Scene::new(3);
    let activities = ActivityRegistry::builder()
        .register("Work", |_: ActivityContext, input: String| async move { Ok(input.len().to_string()) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Busy", |ctx: OrchestrationContext, left: String| async move {
            let left: u32 = left.parse().map_err(|_| "no number".to_owned())?;
            if left == 0 {
                return Ok("done".to_owned());
            }
            ctx.set_kv_value("left", left.to_string());
            ctx.set_custom_status(format!("{left} left"));
            let large = "x".repeat(6_000);
            let work = (0..4).map(|_| ctx.schedule_activity("Work", large.as_str())).collect();
            let child = ctx.schedule_sub_orchestration("Child", "");
            ctx.schedule_timer(Duration::from_millis(30)).await;
            ctx.join(work).await;
            child.await?;
            // One of them loses.
            let (slow, fast) = (ctx.schedule_timer(Duration::from_secs(600)), ctx.schedule_activity("Work", "y"));
            ctx.select2(slow, fast).await;
            ctx.continue_as_new((left - 1).to_string()).await
        })
        .register(
            "Child",
            |ctx: OrchestrationContext, _: String| async move { ctx.schedule_activity("Work", "z").await },
        )
        .build();
    let mut runtimes = Vec::new();
    for number in 0..2 {
        let provider = Arc::new(scene.provider(&format!("worker {number}")).await);
        runtimes.push(Runtime::start_with_store(provider, activities.clone(), orchestrations.clone()).await);
    }
    let store = Arc::new(scene.provider("client").await);
    let client = Client::new(store.clone());
    for n in 0..INSTANCES {
        client.start_orchestration(format!("busy {n}"), "Busy", "4").await.unwrap();
    }
    let all_ended = async {
        for n in 0..INSTANCES {
            let ended = client.wait_for_orchestration(&format!("busy {n}"), PATIENCE).await.unwrap();
            assert!(matches!(ended, OrchestrationStatus::Completed { .. }), "{ended:?}");
        }
    };
    let looked = std::sync::atomic::AtomicUsize::new(0);
    let looking = async {
        let doctor = store.doctor().await.unwrap();
        loop {
            let mut suspects = doctor.scan(Duration::ZERO, true);
            while let Some(page) = suspects.next().await.unwrap() {
                for instance in page {
                    if let Some(diagnosis) = doctor.diagnose(&instance).await.unwrap() {
                        assert_eq!(diagnosis.findings, [], "{diagnosis:#?}");
                        looked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    }
                }
            }
        }
    };
    tokio::select! {
        () = all_ended => {}
        () = looking => {}
    }
    assert!(looked.into_inner() > INSTANCES, "somebody looked while they ran");
    for runtime in runtimes {
        runtime.shutdown(None).await;
    }
}
