//! A served account with a provider, and the CLI as a process.

use crate::workflows;
use duroxide::{
    providers::{ExecutionMetadata, Provider, ProviderAdmin, WorkItem},
    runtime::Runtime,
    Client, Event, EventKind,
};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, Served};
use serde_json::Value;
use std::{
    process::{Output, Stdio},
    sync::Arc,
    time::Duration,
};
use tokio::process::Command;

/// The time limit for everything that a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// An account that is served on loopback, with a provider on it.
pub struct Fixture {
    pub account: LocalAccount,
    pub served: Served,
    pub provider: Arc<CosmosDBProvider>,
    pub client: Client,
}

impl Fixture {
    pub async fn open() -> Self {
        let account = LocalAccount::new();
        let served = account.serve("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let key = Credential::account_key(account.key().to_owned());
        let config = CosmosDBProviderConfig::default().with_endpoint(served.endpoint()).with_credential(key);
        let provider = Arc::new(CosmosDBProvider::new_with_config(config).await.unwrap());
        Self { account, served, client: Client::new(provider.clone()), provider }
    }

    /// Starts a worker with the orchestrations of the examples.
    pub async fn start_worker(&self) -> Arc<Runtime> {
        Runtime::start_with_store(self.provider.clone(), workflows::activities(), workflows::orchestrations()).await
    }

    /// The CLI with the environment of this account.
    pub fn cli(&self, arguments: &[&str]) -> Command {
        let mut command = cli(arguments);
        command.env("COSMOS_ENDPOINT", self.served.endpoint()).env("COSMOS_KEY", self.account.key());
        command
    }

    /// Runs the CLI to its end.
    pub async fn run(&self, arguments: &[&str]) -> Finished {
        finish(self.cli(arguments)).await
    }

    /// Runs the CLI with `--json` and returns the objects that it prints.
    pub async fn json(&self, arguments: &[&str]) -> Vec<Value> {
        let finished = self.run(&[arguments, &["--json"]].concat()).await;
        assert_eq!(finished.code, 0, "{arguments:?}: {finished:?}");
        finished.out.lines().map(|line| serde_json::from_str(line).expect("an object per line")).collect()
    }

    /// Starts an instance on the worker and waits for its end.
    pub async fn complete(&self, id: &str, orchestration: &str, input: &str) {
        self.client.start_orchestration(id, orchestration, input).await.unwrap();
        self.client.wait_for_orchestration(id, PATIENCE).await.unwrap();
    }

    /// Starts an `Order` on the worker and waits until it waits for approval.
    pub async fn start_order(&self, id: &str, input: &str) {
        self.client.start_orchestration(id, "Order", input).await.unwrap();
        self.client.wait_for_status_change(id, 0, Duration::from_millis(20), PATIENCE).await.unwrap();
    }

    /// Starts an instance without a worker and commits its only turn, which leaves this status.
    pub async fn commit_one_turn(&self, instance: &str, parent: Option<&str>, status: Option<&str>) {
        self.provider.enqueue_for_orchestrator(start_message(instance, parent), None).await.unwrap();
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
        let subscribed = EventKind::ExternalSubscribed { name: "note".to_owned() };
        let events = vec![Event::with_event_id(1, instance, 1, None, subscribed)];
        let committed = self.provider.ack_orchestration_item(&token, 1, events, vec![], vec![], metadata, vec![]);
        committed.await.unwrap();
    }

    /// Deletes the instance document and leaves the rest of the instance.
    pub async fn delete_instance_document(&self, instance: &str) {
        let client = self.account.client_named("vandal").await;
        let container = client.database_client("duroxide").container_client("duroxide", None).await.unwrap();
        container.delete_item(instance.to_owned(), "instance", None).await.unwrap();
    }

    /// The number of messages that wait for turns.
    pub async fn waiting_messages(&self) -> usize {
        ProviderAdmin::get_queue_depths(&*self.provider).await.unwrap().orchestrator_queue
    }
}

/// The message that starts an instance, as a root or as a child.
pub fn start_message(instance: &str, parent: Option<&str>) -> WorkItem {
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

/// A CLI process that has ended.
#[derive(Debug)]
pub struct Finished {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// The CLI without an account in its environment.
pub fn cli(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_duroxide-cosmos"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    for variable in
        ["COSMOS_ENDPOINT", "COSMOS_KEY", "COSMOS_CONNECTION_STRING", "COSMOS_CONTAINER", "COSMOS_DATABASE", "RUST_LOG"]
    {
        command.env_remove(variable);
    }
    command
}

/// Runs a process to its end.
pub async fn finish(mut command: Command) -> Finished {
    // `Command::output` would replace the pipes that a test has chosen.
    let running = command.spawn().expect("the CLI runs").wait_with_output();
    let Output { status, stdout, stderr } =
        tokio::time::timeout(PATIENCE, running).await.expect("in time").expect("the CLI ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Finished { code: status.code().unwrap_or(-1), out: text(stdout), err: text(stderr) }
}
