//! The tool and families that are not whole: one of which a member runs, and one whose root is gone.

use duroxide::{
    providers::{ExecutionMetadata, Provider, WorkItem},
    Event, EventKind,
};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, Served};
use std::{process::Stdio, time::Duration};
use tokio::process::Command;

const PATIENCE: Duration = Duration::from_secs(60);

fn start(instance: &str, parent: Option<&str>) -> WorkItem {
    WorkItem::StartOrchestration {
        instance: instance.to_owned(),
        orchestration: "Order".to_owned(),
        input: "{}".to_owned(),
        version: Some("1.0.0".to_owned()),
        parent_instance: parent.map(ToOwned::to_owned),
        parent_id: parent.map(|_| 2),
        parent_execution_id: parent.map(|_| 1),
        execution_id: 1,
    }
}

struct Site {
    account: LocalAccount,
    served: Served,
    provider: CosmosDBProvider,
}

impl Site {
    async fn open() -> Self {
        let account = LocalAccount::new();
        let served = account.serve("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let key = Credential::account_key(account.key().to_owned());
        let config = CosmosDBProviderConfig::default().with_endpoint(served.endpoint()).with_credential(key);
        let provider = CosmosDBProvider::new_with_config(config).await.unwrap();
        Self { account, served, provider }
    }

    /// Starts an instance and commits its only turn, which leaves this status.
    async fn play(&self, instance: &str, parent: Option<&str>, status: Option<&str>) {
        self.provider.enqueue_for_orchestrator(start(instance, parent), None).await.unwrap();
        let fetched = self.provider.fetch_orchestration_item(PATIENCE, PATIENCE, None).await.unwrap();
        let (item, token, _) = fetched.expect("a turn");
        assert_eq!(item.instance, instance);
        let metadata = ExecutionMetadata {
            orchestration_name: Some("Order".to_owned()),
            orchestration_version: Some("1.0.0".to_owned()),
            parent_instance_id: parent.map(ToOwned::to_owned),
            status: status.map(ToOwned::to_owned),
            ..ExecutionMetadata::default()
        };
        let note = EventKind::ExternalSubscribed { name: "note".to_owned() };
        let events = vec![Event::with_event_id(1, instance, 1, None, note)];
        let committed = self.provider.ack_orchestration_item(&token, 1, events, vec![], vec![], metadata, vec![]);
        committed.await.unwrap();
    }

    /// Runs the tool: its exit code, and what it prints.
    async fn run(&self, arguments: &[&str]) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_duroxide-cosmos"));
        command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
        command.env_remove("COSMOS_CONNECTION_STRING");
        command.env("COSMOS_ENDPOINT", self.served.endpoint()).env("COSMOS_KEY", self.account.key());
        let output = tokio::time::timeout(PATIENCE, command.output()).await.expect("in time").expect("it runs");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code().unwrap_or(-1), String::from_utf8(text).expect("text"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_leaves_a_family_with_a_running_member_and_says_so() {
    let site = Site::open().await;
    for status in [None, Some("ContinuedAsNew")] {
        let (root, child) = (format!("root-{status:?}"), format!("child-{status:?}"));
        site.play(&root, None, Some("Completed")).await;
        site.play(&child, Some(&root), status).await;
    }
    site.play("whole", None, Some("Completed")).await;
    let (code, printed) = site.run(&["purge", "--ended-before", "0s", "--yes"]).await;
    assert_eq!(code, 0, "{printed}");
    assert!(printed.contains("deleted 1 instances"), "{printed}");
    assert_eq!(printed.matches("stays: a member of its family runs").count(), 2, "{printed}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orphan_is_deleted_by_its_own_name() {
    let site = Site::open().await;
    site.play("orphan", Some("nobody"), Some("Completed")).await;
    let (code, printed) = site.run(&["delete", "orphan", "--yes"]).await;
    assert_eq!(code, 0, "{printed}");
    assert!(printed.contains("deleted 1 instances"), "{printed}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_whose_parent_is_gone_is_deleted_by_its_own_name() {
    let site = Site::open().await;
    site.play("parent", None, None).await;
    for (instance, parent) in [("child", "parent"), ("orphan", "nobody")] {
        site.provider.enqueue_for_orchestrator(start(instance, Some(parent)), None).await.unwrap();
    }
    let (code, printed) = site.run(&["delete", "child", "--force", "--yes"]).await;
    assert_eq!(code, 1, "{printed}");
    assert!(printed.contains("is a child of \"parent\""), "{printed}");
    let (code, printed) = site.run(&["delete", "orphan", "--force", "--yes"]).await;
    assert_eq!(code, 0, "{printed}");
    assert!(printed.contains("deleted 1 instances"), "{printed}");
}
