//! Messages that this version cannot read stay in the queue and delay no other message.

use crate::fixture::*;
use duroxide::providers::Provider;
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::RequestKind;
use serde_json::json;
use std::time::Duration;

/// Turns a message into one of a kind that only a newer version knows.
async fn of_an_unknown_kind(fixture: &Fixture, instance: &str, id: &str) {
    let item = json!({ "InventedLater": { "instance": instance, "data": "1" } }).to_string();
    fixture.change(instance, id, |document| document["item"] = json!(item)).await;
}

async fn message_ids(fixture: &Fixture, instance: &str) -> Vec<String> {
    let messages = fixture.documents_of_type(instance, "message").await;
    messages.iter().map(|message| message["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_message_of_an_unknown_kind_is_left_for_a_version_that_knows_it() {
    let fixture = Fixture::new(1);
    let maker = fixture.provider("maker").await;
    begin(&maker, "a", Vec::new(), Vec::new()).await;
    maker.enqueue_for_orchestrator(external("a", "unknown"), None).await.unwrap();
    let unknown = message_ids(&fixture, "a").await.remove(0);
    of_an_unknown_kind(&fixture, "a", &unknown).await;
    maker.enqueue_for_orchestrator(external("a", "known"), None).await.unwrap();

    // The other message gets its turn, with its first attempt.
    let older = fixture.provider("older").await;
    let (item, token, attempts) = next_turn(&older, LONG).await;
    assert_eq!((item.history_error, item.messages, attempts), (None, vec![external("a", "known")], 1));
    commit(&older, &token, vec![filler("a", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();

    // The unknown message is unchanged, and no poll finds it now.
    let left = fixture.documents_of_type("a", "message").await.remove(0);
    assert_eq!((left["id"].as_str(), &left["attempts"]), (Some(unknown.as_str()), &json!(0)));
    assert!(left["item"].as_str().unwrap().contains("InventedLater"));
    assert!(left["due"].as_u64() > left["createdAt"].as_u64(), "{left}");
    assert!(older.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    assert!(fixture.documents_of_type("a", "instance").await[0]["lock"].is_null());

    // A version that knows the message gets it.
    let item = serde_json::to_string(&external("a", "unknown")).unwrap();
    fixture.change("a", &unknown, |document| document["item"] = json!(item)).await;
    let (item, _, attempts) = next_turn(&fixture.provider("newer").await, LONG).await;
    assert_eq!((item.messages, attempts), (vec![external("a", "unknown")], 1));
}

#[tokio::test]
async fn a_message_that_cannot_be_read_delays_no_other_message() {
    let fixture = Fixture::new(1);
    let maker = fixture.provider("maker").await;
    begin(&maker, "a", Vec::new(), Vec::new()).await;
    maker.enqueue_for_orchestrator(external("a", "unknown"), None).await.unwrap();
    let unknown = message_ids(&fixture, "a").await.remove(0);
    fixture.change("a", &unknown, |document| document["attempts"] = json!("many")).await;
    maker.enqueue_for_orchestrator(external("a", "known"), None).await.unwrap();
    let older = fixture.provider("older").await;
    let (item, _, _) = next_turn(&older, LONG).await;
    assert_eq!(item.messages, [external("a", "known")]);
    let left =
        fixture.documents_of_type("a", "message").await.into_iter().find(|message| message["id"] == *unknown).unwrap();
    assert_eq!(left["attempts"], json!("many"));
}

#[tokio::test]
async fn an_instance_with_only_unknown_messages_is_not_claimed_repeatedly() {
    let fixture = Fixture::new(1);
    let maker = fixture.provider("maker").await;
    begin(&maker, "a", Vec::new(), Vec::new()).await;
    // One message is for an instance, and one for a name without an instance.
    for instance in ["a", "nobody"] {
        maker.enqueue_for_orchestrator(external(instance, "1"), None).await.unwrap();
        let id = message_ids(&fixture, instance).await.remove(0);
        of_an_unknown_kind(&fixture, instance, &id).await;
        let older = fixture.provider(&format!("older of {instance}")).await;
        assert!(older.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
        let left = fixture.documents_of_type(instance, "message").await.remove(0);
        assert!(left["due"].as_u64() > left["createdAt"].as_u64(), "{left}");
        let instances = fixture.documents_of_type(instance, "instance").await;
        assert!(instances.iter().all(|document| document["lock"].is_null() && document["claims"].is_null()));
    }
}

const NAME: &str = "name";

const HOUR: i64 = 3_600_000;

/// Hundreds of messages of a kind that only a newer version knows, and one behind them that this version knows.
async fn with_unknown(fixture: &Fixture, provider: &CosmosDBProvider, count: usize) {
    for number in 0..count {
        provider.enqueue_for_orchestrator(queue_message(NAME, "queue", &number.to_string()), None).await.unwrap();
    }
    for mut message in fixture.documents_of_type(NAME, "message").await {
        message["item"] = "{\"OfANewerVersion\":{}}".into();
        let id = message["id"].as_str().unwrap().to_owned();
        fixture.container().await.replace_item(NAME.to_owned(), &id, &message, None).await.unwrap();
    }
}

/// The number of messages that are not due yet.
async fn delayed(fixture: &Fixture, now: u64) -> usize {
    fixture
        .documents_of_type(NAME, "message")
        .await
        .iter()
        .filter(|message| message["due"].as_u64() > Some(now))
        .count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_does_not_wait_until_hundreds_of_unreadable_ones_are_delayed() {
    const MANY: usize = 600;
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    begin(&a, NAME, Vec::new(), Vec::new()).await;
    with_unknown(&fixture, &a, MANY).await;
    a.enqueue_for_orchestrator(external(NAME, "known"), None).await.unwrap();
    let before = fixture.account.stats_of("b");
    let (item, token, _) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, [external(NAME, "known")]);
    let batches = (fixture.account.stats_of("b") - before).of(RequestKind::Batch).requests;
    assert!(batches <= 4, "{batches} batches before the turn");
    let now = fixture.documents_of_type(NAME, "instance").await.pop().unwrap()["claims"][0].as_u64().unwrap();
    assert!(delayed(&fixture, now).await < 200, "the others can wait");
    commit(&b, &token, vec![filler(NAME, 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    // They are delayed nevertheless, by this claim and the next ones.
    let all_delayed = async {
        while delayed(&fixture, now).await < MANY {
            assert!(b.fetch_orchestration_item(LONG, Duration::from_millis(200), None).await.unwrap().is_none());
        }
    };
    tokio::time::timeout(PATIENCE, all_delayed).await.expect("all of them are delayed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_deferred_message_that_cannot_be_read_is_lost() {
    const MANY: usize = 250;
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", config_ahead_by(HOUR)).await);
    a.enqueue_for_orchestrator(external(NAME, "known"), None).await.unwrap();
    assert_no_turn(&a).await;
    with_unknown(&fixture, &a, MANY - 1).await;
    for mut message in fixture.documents_of_type(NAME, "message").await {
        message["due"] = ((1u64 << 53) - 1).into();
        let id = message["id"].as_str().unwrap().to_owned();
        fixture.container().await.replace_item(NAME.to_owned(), &id, &message, None).await.unwrap();
    }
    a.enqueue_for_orchestrator(start(NAME), None).await.unwrap();
    let (item, token, _) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, [start(NAME)]);
    commit(&b, &token, vec![started(NAME, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    let none_is_parked = async {
        while fixture.documents_of_type(NAME, "message").await.iter().any(|m| m["due"].as_u64() == Some((1 << 53) - 1))
        {
            assert!(b.fetch_orchestration_item(LONG, Duration::from_millis(200), None).await.unwrap().is_none());
        }
    };
    tokio::time::timeout(PATIENCE, none_is_parked).await.expect("each is visible to a version that knows it");
    assert_eq!(fixture.documents_of_type(NAME, "message").await.len(), MANY);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inlined_message_that_cannot_be_read_stays_beside_hundreds_of_others() {
    const MANY: usize = 150;
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", config_ahead_by(HOUR)).await);
    begin(&a, NAME, Vec::new(), Vec::new()).await;
    with_unknown(&fixture, &a, MANY).await;
    // The last message is inlined in the instance's document: its worker crashed after an inline claim.
    let container = fixture.container().await;
    let mut instance = fixture.documents_of_type(NAME, "instance").await.remove(0);
    let message = fixture.documents_of_type(NAME, "message").await.pop().unwrap();
    let id = message["id"].as_str().unwrap().to_owned();
    instance["inlined"] =
        ["id", "due", "seq", "createdAt", "item"].map(|name| (name, message[name].clone())).into_iter().collect();
    instance["due"] = message["due"].clone();
    container.delete_item(NAME.to_owned(), &id, None).await.unwrap();
    container.replace_item(NAME.to_owned(), "instance", &instance, None).await.unwrap();
    a.enqueue_for_orchestrator(external(NAME, "known"), None).await.unwrap();
    let (item, token, _) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, [external(NAME, "known")]);
    commit(&b, &token, vec![filler(NAME, 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    let left = fixture.documents_of_type(NAME, "message").await;
    assert!(left.iter().any(|message| message["id"] == *id), "the inlined message is left for a version that knows it");
    assert_eq!(left.len(), MANY);
}

const INSTANCE: &str = "i";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_message_document_does_not_delay_the_turns_of_other_instances() {
    let fixture = Fixture::new(1);
    let (sender, worker) = (fixture.provider("sender").await, fixture.provider("worker").await);
    sender.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    fixture.change_type(INSTANCE, "message", |message| message["createdAt"] = json!("yesterday")).await;
    sender.enqueue_for_orchestrator(start("other"), None).await.unwrap();
    let (item, _, _) = next_turn(&worker, LONG).await;
    assert_eq!(item.instance, "other");
    let requests = fixture.account.stats_of("worker").items().requests;
    assert!(worker.fetch_orchestration_item(LONG, std::time::Duration::from_secs(2), None).await.unwrap().is_none());
    // Polls look at the message again, but rarely.
    let more = fixture.account.stats_of("worker").items().requests - requests;
    assert!(more < 40, "{more} requests in two seconds");
}
