//! What a committed turn owes to other instances is delivered once: after an outage, by another process, and when the first
//! copy has long been consumed. One that can't be delivered is kept and reported, and the others don't wait for it.

#[path = "common/scene.rs"]
mod scene;

use azure_data_cosmos::PartitionKey;
use duroxide::providers::{Provider, WorkItem};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRule, WireRuleHandle};
use scene::*;
use serde_json::Value;
use std::collections::BTreeMap;

const PARENT: &str = "parent";
const CHILDREN: [&str; 4] = ["child 1", "child 2", "child 3", "child 4"];

/// Keeps what `client` delivers from the partitions of the children.
fn block(scene: &Scene, client: &str, action: WireAction) -> WireRuleHandle {
    let to_children = |r: &duroxide_cosmos_emulator::WireRequest<'_>| CHILDREN.iter().any(|child| goes_to(r, child));
    let rule = WireRule::new(action).client(client).on(RequestKind::Create).matching(to_children);
    scene.account.wire().add(rule)
}

fn unavailable() -> WireAction {
    WireAction::Refuse { status: 503, substatus: None, retry_after: None }
}

/// Two turns of the parent, each of which starts two children.
async fn two_turns(provider: &CosmosDBProvider) {
    let children =
        |from: usize| CHILDREN[from..from + 2].iter().map(|child| start_child(child, Some(PARENT))).collect();
    begin(provider, PARENT, Vec::new(), children(0)).await;
    provider.enqueue_for_orchestrator(external(PARENT, "go on"), None).await.unwrap();
    let (item, token, _) = next_turn(provider, LONG).await;
    assert_eq!(item.instance, PARENT);
    let events = vec![note(PARENT, 1, 2)];
    commit(provider, &token, events, Vec::new(), children(2), running()).await.unwrap();
}

/// Runs every turn that there is; the starts that each child had.
async fn run_all(provider: &CosmosDBProvider) -> BTreeMap<String, usize> {
    let mut starts = BTreeMap::new();
    while let Some((item, token, _)) = provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap() {
        let started_here = item.messages.iter().filter(|m| matches!(m, WorkItem::StartOrchestration { .. })).count();
        *starts.entry(item.instance.clone()).or_default() += started_here;
        let events = if item.history.is_empty() { vec![started(&item.instance, 1)] } else { Vec::new() };
        commit(provider, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
    }
    starts
}

fn each_once(children: &[&str]) -> BTreeMap<String, usize> {
    children.iter().map(|child| ((*child).to_owned(), 1)).collect()
}

async fn intents(scene: &Scene) -> Vec<Value> {
    scene.of_kind(PARENT, "intent").await
}

#[tokio::test]
async fn children_whose_starts_were_held_up_start_exactly_once_when_they_come_through() {
    let scene = Scene::new(2);
    let a = scene.provider("a").await;
    let blocked = block(&scene, "a", unavailable());
    two_turns(&a).await;
    blocked.wait_for_hits(4).await;
    assert_eq!(intents(&scene).await.len(), 4);
    assert_eq!(run_all(&a).await, BTreeMap::new());
    blocked.remove();
    // The deliveries are under way in the background, and are waited for.
    a.shutdown().await;
    assert_eq!(intents(&scene).await, Vec::<Value>::new());
    let b = scene.provider("b").await;
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
    assert_eq!(b.reconcile().await.unwrap(), 0);
}

#[tokio::test]
async fn another_process_takes_the_deliveries_of_a_dead_one_over() {
    let scene = Scene::new(2);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    let blocked = block(&scene, "a", WireAction::FailConnection);
    two_turns(&a).await;
    blocked.wait_for_hits(4).await;
    scene.cut("a", 0);
    drop(a);
    assert_eq!(b.reconcile().await.unwrap(), 4);
    assert_eq!(intents(&scene).await, Vec::<Value>::new());
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
    assert_eq!(b.reconcile().await.unwrap(), 0);
    assert_eq!(run_all(&b).await, BTreeMap::new());
}

#[tokio::test]
async fn two_processes_that_deliver_the_same_messages_start_each_child_once() {
    let scene = Scene::new(2);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    // What `a` delivers arrives, but it never hears of it, and keeps trying while `b` takes over and runs the children.
    let deaf = block(&scene, "a", WireAction::LoseAnswer);
    two_turns(&a).await;
    deaf.wait_for_hits(4).await;
    b.reconcile().await.unwrap();
    let mut starts = run_all(&b).await;
    deaf.remove();
    a.shutdown().await;
    b.reconcile().await.unwrap();
    for (child, more) in run_all(&b).await {
        *starts.entry(child).or_default() += more;
    }
    assert_eq!(starts, each_once(&CHILDREN));
    assert_eq!(intents(&scene).await, Vec::<Value>::new());
}

#[tokio::test]
async fn a_message_that_comes_again_after_its_first_copy_was_consumed_is_not_consumed_again() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    // The deletion of the intents does not come through: they are delivered, and still there.
    let kept = WireRule::new(unavailable()).client("a").matching(|r| goes_to(r, PARENT));
    let kept = kept.on(RequestKind::Delete).on(RequestKind::Batch).skip(1);
    let kept = scene.account.wire().add(kept);
    begin(&a, PARENT, Vec::new(), CHILDREN.iter().map(|child| start_child(child, Some(PARENT))).collect()).await;
    kept.wait_for_hits(1).await;
    let left = intents(&scene).await;
    assert_eq!(left.len(), 4);
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
    // `b` delivers them again, and deletes them; its polls may have seen to that.
    b.reconcile().await.unwrap();
    assert_eq!(intents(&scene).await, Vec::<Value>::new());
    assert_eq!(run_all(&b).await, BTreeMap::new());
    // Once more, from a copy that somebody restored.
    let container = scene.container().await;
    for intent in &left {
        let id = intent["id"].as_str().unwrap();
        container.create_item(PartitionKey::from(PARENT), id, intent, None).await.unwrap();
    }
    assert_eq!(b.reconcile().await.unwrap(), 4);
    assert_eq!(run_all(&b).await, BTreeMap::new());
}

#[tokio::test]
async fn a_message_that_its_target_refuses_is_kept_with_the_reason_and_the_others_arrive() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    let refuse = WireAction::Refuse { status: 400, substatus: None, retry_after: None };
    let refused = WireRule::new(refuse).on(RequestKind::Create).matching(|r| goes_to(r, CHILDREN[1]));
    let refused = scene.account.wire().add(refused);
    begin(&a, PARENT, Vec::new(), CHILDREN.iter().map(|child| start_child(child, Some(PARENT))).collect()).await;
    a.shutdown().await;
    let kept = intents(&scene).await;
    assert_eq!(kept.len(), 1);
    assert_eq!(kept[0]["target"], CHILDREN[1]);
    assert!(kept[0]["poisoned"].as_str().unwrap().contains("400"), "{}", kept[0]["poisoned"]);
    let b = scene.provider("b").await;
    assert_eq!(run_all(&b).await, each_once(&[CHILDREN[0], CHILDREN[2], CHILDREN[3]]));
    // Nobody tries it again by himself.
    let hits = refused.hits();
    assert_eq!(b.reconcile().await.unwrap(), 0);
    assert_eq!(refused.hits(), hits);
}

#[tokio::test]
async fn a_role_that_is_missing_for_a_while_poisons_no_message() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    let denied = block(&scene, "a", WireAction::Refuse { status: 403, substatus: None, retry_after: None });
    two_turns(&a).await;
    denied.wait_for_hits(4).await;
    a.shutdown().await;
    assert!(intents(&scene).await.iter().all(|intent| intent.get("poisoned").is_none()));
    assert_eq!(b.reconcile().await.unwrap(), 4);
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
}
