//! One instance with many messages does not hold up the others.

use duroxide::providers::{Provider, WorkItem};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::LocalAccount;
use std::time::Duration;

/// Several pages of a poll.
const MESSAGES: usize = 350;

fn start(instance: &str) -> WorkItem {
    WorkItem::StartOrchestration {
        instance: instance.to_owned(),
        orchestration: "Orchestration".to_owned(),
        input: String::new(),
        version: Some("1.0.0".to_owned()),
        parent_instance: None,
        parent_id: None,
        parent_execution_id: None,
        execution_id: 1,
    }
}

async fn provider(account: &LocalAccount, name: &str) -> CosmosDBProvider {
    let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
    CosmosDBProvider::new_with_client(&account.client_named(name).await, config).await.expect("a provider")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_behind_pages_of_anothers_messages_is_found_by_a_process_that_did_not_enqueue_them() {
    let account = LocalAccount::new();
    let sender = provider(&account, "sender").await;
    sender.enqueue_for_orchestrator(start("loud"), None).await.unwrap();
    for n in 0..MESSAGES {
        let event = WorkItem::ExternalRaised { instance: "loud".into(), name: "event".into(), data: n.to_string() };
        sender.enqueue_for_orchestrator(event, None).await.unwrap();
    }
    sender.enqueue_for_orchestrator(start("quiet"), None).await.unwrap();

    let worker = provider(&account, "worker").await;
    let (lock, patience) = (Duration::from_secs(60), Duration::from_secs(30));
    let (first, _token, _) =
        worker.fetch_orchestration_item(lock, patience, None).await.unwrap().expect("the oldest goes first");
    assert_eq!(first.instance, "loud");
    assert_eq!(first.messages.len(), MESSAGES + 1);
    let (second, _token, _) =
        worker.fetch_orchestration_item(lock, patience, None).await.unwrap().expect("the other is not held up");
    assert_eq!(second.instance, "quiet");
}
