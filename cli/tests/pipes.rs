//! The tool when nobody reads its output any more, and starts that no worker has taken.

#[path = "../../examples/common/workflows.rs"]
#[allow(dead_code)]
mod workflows;

use duroxide::{providers::Provider, runtime::Runtime, Client, OrchestrationStatus};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, RequestKind, Served, WireAction, WireRequest, WireRule};
use serde_json::Value;
use std::{
    io::PipeWriter,
    process::{Output, Stdio},
    sync::Arc,
    time::Duration,
};
use tokio::process::Command;

const PATIENCE: Duration = Duration::from_secs(60);

/// An account without a worker.
struct Site {
    account: LocalAccount,
    served: Served,
    provider: Arc<CosmosDBProvider>,
    client: Client,
}

impl Site {
    async fn open() -> Self {
        let account = LocalAccount::new();
        let served = account.serve("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let key = Credential::account_key(account.key().to_owned());
        let config = CosmosDBProviderConfig::default().with_endpoint(served.endpoint()).with_credential(key);
        let provider = Arc::new(CosmosDBProvider::new_with_config(config).await.unwrap());
        Self { account, served, client: Client::new(provider.clone()), provider }
    }

    async fn worker(&self) -> Arc<Runtime> {
        Runtime::start_with_store(self.provider.clone(), workflows::activities(), workflows::orchestrations()).await
    }

    fn tool(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_duroxide-cosmos"));
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        for variable in ["COSMOS_CONNECTION_STRING", "COSMOS_CONTAINER", "COSMOS_DATABASE", "RUST_LOG"] {
            command.env_remove(variable);
        }
        command.env("COSMOS_ENDPOINT", self.served.endpoint()).env("COSMOS_KEY", self.account.key());
        command
    }

    /// Runs the tool to its end: its exit code, what it printed, and its errors.
    async fn run(&self, arguments: &[&str]) -> Ran {
        finish(self.tool(arguments)).await
    }

    /// Deletes the document that says what an instance is.
    async fn behead(&self, instance: &str) {
        let client = self.account.client_named("vandal").await;
        let container = client.database_client("duroxide").container_client("duroxide", None).await.unwrap();
        container.delete_item(instance.to_owned(), "instance", None).await.unwrap();
    }
}

#[derive(Debug)]
struct Ran {
    code: i32,
    out: String,
    err: String,
}

async fn finish(mut command: Command) -> Ran {
    // `output` would replace the pipes that a test has chosen.
    let running = command.spawn().expect("it runs").wait_with_output();
    let Output { status, stdout, stderr } =
        tokio::time::timeout(PATIENCE, running).await.expect("in time").expect("it ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Ran { code: status.code().unwrap_or(-1), out: text(stdout), err: text(stderr) }
}

/// The writing end of a pipe that nobody reads.
fn unread() -> PipeWriter {
    std::io::pipe().expect("a pipe").1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_nobody_reads_ends_quietly() {
    let site = Site::open().await;
    let runtime = site.worker().await;
    site.client.start_orchestration("greeting", "Greeting", "Ada").await.unwrap();
    site.client.wait_for_orchestration("greeting", PATIENCE).await.unwrap();
    for arguments in [&["list"][..], &["list", "--json"], &["show", "greeting"], &["--help"], &["completions", "bash"]]
    {
        let mut command = site.tool(arguments);
        command.stdout(unread());
        let ran = finish(command).await;
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{arguments:?}: {ran:?}");
    }
    runtime.shutdown(None).await;
}

/// With `2>&1 | head` nobody reads errors either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_that_nobody_reads_does_not_change_how_a_command_ends() {
    let site = Site::open().await;
    for (arguments, code) in [
        (&["show", "nobody"][..], 3),
        (&["list", "--cursor", "rubbish"], 1),
        (&["doctor", "nobody"], 3),
        (&["list", "--status", "broken"], 2),
    ] {
        let mut command = site.tool(arguments);
        command.stdout(unread()).stderr(unread());
        assert_eq!(finish(command).await.code, code, "{arguments:?}");
    }
    // The libraries' log goes the same way.
    let mut command = site.tool(&["show", "nobody"]);
    command.stdout(unread()).stderr(unread()).env("RUST_LOG", "trace");
    assert_eq!(finish(command).await.code, 3, "with a log");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_goes_on_to_its_end_when_nobody_reads_what_it_says() {
    let site = Site::open().await;
    let runtime = site.worker().await;
    let instances: Vec<String> = (0..5).map(|n| format!("order-{n}")).collect();
    for instance in &instances {
        site.client.start_orchestration(instance, "Order", "a book").await.unwrap();
        site.client.wait_for_status_change(instance, 0, Duration::from_millis(20), PATIENCE).await.unwrap();
    }
    runtime.shutdown(None).await;
    for instance in &instances {
        site.behead(instance).await;
    }
    // One of them can't be looked at, which is an error to print.
    let refused = WireAction::Refuse { status: 403, substatus: Some(5302), retry_after: None };
    let of_first = |request: &WireRequest<'_>| request.partition_key == Some("[\"order-0\"]");
    let rule = site.account.wire().add(WireRule::new(refused).on(RequestKind::Query).matching(of_first));
    let mut command = site.tool(&["doctor", "--all", "--repair", "--yes"]);
    command.stdout(unread()).stderr(unread());
    assert_eq!(finish(command).await.code, 1);
    assert!(rule.hits() > 0);
    for instance in &instances[1..] {
        let status = site.client.get_orchestration_status(instance).await.unwrap();
        assert!(matches!(status, OrchestrationStatus::Running { .. }), "{instance}: {status:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_goes_on_to_its_end_when_its_output_has_no_room() {
    let site = Site::open().await;
    let runtime = site.worker().await;
    site.client.start_orchestration("order", "Order", "a book").await.unwrap();
    site.client.wait_for_status_change("order", 0, Duration::from_millis(20), PATIENCE).await.unwrap();
    runtime.shutdown(None).await;
    site.behead("order").await;
    let mut command = site.tool(&["doctor", "order", "--repair", "--yes"]);
    command.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
    let ran = finish(command).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("the output can't be written"), "{ran:?}");
    let status = site.client.get_orchestration_status("order").await.unwrap();
    assert!(matches!(status, OrchestrationStatus::Running { .. }), "{status:?}");
}

async fn messages(site: &Site) -> usize {
    let depths = duroxide::providers::ProviderAdmin::get_queue_depths(&*site.provider).await.unwrap();
    depths.orchestrator_queue
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_start_is_refused_while_the_first_waits_for_a_worker() {
    let site = Site::open().await;
    assert_eq!(site.run(&["start", "Greeting", "Ada", "--instance", "i"]).await.code, 0);
    let ran = site.run(&["start", "Greeting", "Bob", "--instance", "i"]).await;
    assert_eq!((ran.code, ran.out.as_str()), (1, ""), "{ran:?}");
    assert!(ran.err.contains("a start of \"i\" waits for a worker"), "{ran:?}");
    assert_eq!(messages(&site).await, 1);
    // A start whose time has not come counts as well.
    let start = duroxide::providers::WorkItem::StartOrchestration {
        instance: "later".to_owned(),
        orchestration: "Greeting".to_owned(),
        input: String::new(),
        version: None,
        parent_instance: None,
        parent_id: None,
        parent_execution_id: None,
        execution_id: 1,
    };
    site.provider.enqueue_for_orchestrator(start, Some(PATIENCE)).await.unwrap();
    assert_eq!(site.run(&["start", "Greeting", "Bob", "--instance", "later"]).await.code, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_no_worker_has_taken_is_cancelled() {
    let site = Site::open().await;
    site.run(&["start", "Order", "a book", "--instance", "i"]).await;
    let ran = site.run(&["cancel", "i", "--reason", "sold out"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let runtime = site.worker().await;
    let ran = site.run(&["wait", "i"]).await;
    assert_eq!(ran.code, 5, "{ran:?}");
    assert!(ran.err.contains("sold out"), "{ran:?}");
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_no_worker_has_taken_is_deleted_with_what_waits_for_it() {
    let site = Site::open().await;
    site.run(&["start", "Greeting", "Ada", "--instance", "i"]).await;
    site.run(&["cancel", "i"]).await;
    let ran = site.run(&["delete", "i", "--yes"]).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("--force"), "{ran:?}");
    let ran = site.run(&["delete", "i", "--force", "--dry-run"]).await;
    assert!(ran.out.contains("Greeting") && ran.out.contains("dry run: 1 instances"), "{ran:?}");
    assert_eq!(messages(&site).await, 2);
    let ran = site.run(&["delete", "i", "--force", "--yes", "--json"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let last: Value = serde_json::from_str(ran.out.lines().last().expect("a line")).unwrap();
    assert_eq!(last["deletedInstances"], 1, "{ran:?}");
    assert_eq!(messages(&site).await, 0, "neither the start nor the cancellation is left");
    assert_eq!(site.run(&["delete", "i", "--force", "--yes"]).await.code, 3, "it is gone");
    // The name is free, and nothing of the former start is left to disturb it.
    assert_eq!(site.run(&["start", "Greeting", "Bob", "--instance", "i"]).await.code, 0);
    let runtime = site.worker().await;
    let ran = site.run(&["wait", "i"]).await;
    assert_eq!((ran.code, ran.out.trim()), (0, "Hello, Bob!"), "{ran:?}");
    runtime.shutdown(None).await;
}
