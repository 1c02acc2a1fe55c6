//! The tool as it is used: the binary, an account over HTTP, and a worker beside it.

#[path = "../../examples/common/workflows.rs"]
#[allow(dead_code)]
mod workflows;

use duroxide::{runtime::Runtime, Client};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, Served};
use serde_json::Value;
use std::{process::Stdio, sync::Arc, time::Duration};
use tokio::process::Command;

const PATIENCE: Duration = Duration::from_secs(60);

/// An account with a worker.
struct Site {
    account: LocalAccount,
    served: Served,
    runtime: Arc<Runtime>,
    client: Client,
}

impl Site {
    async fn open() -> Self {
        let account = LocalAccount::new();
        let served = account.serve("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let key = Credential::account_key(account.key().to_owned());
        let config = CosmosDBProviderConfig::default().with_endpoint(served.endpoint()).with_credential(key);
        let provider = Arc::new(CosmosDBProvider::new_with_config(config).await.unwrap());
        let runtime =
            Runtime::start_with_store(provider.clone(), workflows::activities(), workflows::orchestrations()).await;
        Self { account, served, runtime, client: Client::new(provider) }
    }

    /// Runs the tool.
    async fn run(&self, arguments: &[&str]) -> Ran {
        let mut command = tool(arguments);
        command.env("COSMOS_ENDPOINT", self.served.endpoint()).env("COSMOS_KEY", self.account.key());
        finish(command).await
    }

    /// Runs the tool, and what it prints with `--json`.
    async fn json(&self, arguments: &[&str]) -> Vec<Value> {
        let ran = self.run(&[arguments, &["--json"]].concat()).await;
        assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
        ran.out.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect()
    }

    /// Starts an instance and waits for its end.
    async fn play(&self, id: &str, orchestration: &str, input: &str) {
        self.client.start_orchestration(id, orchestration, input).await.unwrap();
        self.client.wait_for_orchestration(id, PATIENCE).await.unwrap();
    }
}

#[derive(Debug)]
struct Ran {
    code: i32,
    out: String,
    err: String,
}

fn tool(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_duroxide-cosmos"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    for variable in ["COSMOS_ENDPOINT", "COSMOS_KEY", "COSMOS_CONNECTION_STRING", "COSMOS_CONTAINER", "COSMOS_DATABASE"]
    {
        command.env_remove(variable);
    }
    command
}

async fn finish(mut command: Command) -> Ran {
    let output = tokio::time::timeout(PATIENCE, command.output()).await.expect("in time").expect("it runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Ran { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_drives_an_instance_from_start_to_end_and_looks_at_it() {
    let site = Site::open().await;
    let ran = site.run(&["start", "Order", "two books", "--instance", "order-1"]).await;
    assert_eq!((ran.code, ran.out.trim()), (0, "started order-1"), "{ran:?}");
    site.client.wait_for_status_change("order-1", 0, Duration::from_millis(20), PATIENCE).await.unwrap();
    let ran = site.run(&["start", "Order", "again", "--instance", "order-1"]).await;
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("is there already"), "{ran:?}");
    let ran = site.run(&["wait", "order-1", "--timeout", "1s"]).await;
    assert_eq!(ran.code, 4, "{ran:?}");
    let ran = site.run(&["show", "order-1"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    for told in ["Order 1.0.0, Running", "status: waiting for approval", "waits  event", "waits  timer"] {
        assert!(ran.out.contains(told), "{told}: {}", ran.out);
    }
    assert_eq!(site.run(&["raise", "order-1", "approval", "yes"]).await.code, 0);
    let ran = site.run(&["wait", "order-1"]).await;
    assert_eq!((ran.code, ran.out.trim()), (0, "shipped two books"), "{ran:?}");
    let ran = site.run(&["raise", "order-1", "approval", "yes"]).await;
    assert_eq!(ran.code, 3, "it has ended: {ran:?}");
    let lines = site.json(&["show", "order-1"]).await;
    assert_eq!((&lines[0]["id"], &lines[0]["status"]), (&"order-1".into(), &"Completed".into()));
    let shipped = lines.iter().find(|line| line["what"] == "activity").expect("the activity");
    assert_eq!((&shipped["name"], &shipped["state"]), (&"Ship".into(), &"done".into()));
    assert!(shipped["ended"].as_u64() >= shipped["at"].as_u64());
    let approval = lines.iter().find(|line| line["what"] == "event").expect("the event");
    assert_eq!((&approval["name"], &approval["state"]), (&"approval".into(), &"done".into()), "it came");
    assert!(lines.iter().all(|line| line["kind"].is_string()), "each says what it is");
    assert!(lines.iter().all(|line| line["input"].is_null()), "payloads are on demand");
    let lines = site.json(&["show", "order-1", "--payloads"]).await;
    assert!(lines.iter().any(|line| line["input"] == "two books"), "{lines:?}");
    let ran = site.run(&["watch", "order-1"]).await;
    assert_eq!(ran.code, 0);
    assert!(ran.out.contains("completed: shipped two books"), "{ran:?}");
    let watched = site.json(&["watch", "order-1"]).await;
    assert_eq!(watched.last().unwrap()["kind"], "end");
    let events = watched.iter().filter(|line| line["kind"] == "event").count();
    let history = site.client.read_execution_history("order-1", 1).await.unwrap().len();
    assert_eq!(events, history, "all of it is told");
    site.runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_is_cancelled_and_its_failure_has_a_code_of_its_own() {
    let site = Site::open().await;
    site.client.start_orchestration("order-1", "Order", "a book").await.unwrap();
    site.client.wait_for_status_change("order-1", 0, Duration::from_millis(20), PATIENCE).await.unwrap();
    assert_eq!(site.run(&["cancel", "order-1", "--reason", "sold out"]).await.code, 0);
    let ran = site.run(&["wait", "order-1"]).await;
    assert_eq!(ran.code, 5, "{ran:?}");
    assert!(ran.err.contains("sold out"), "{ran:?}");
    for command in ["show", "tree", "watch", "cancel"] {
        let ran = site.run(&[command, "nobody"]).await;
        assert_eq!(ran.code, 3, "{command}: {ran:?}");
        assert!(ran.err.contains("there is no instance \"nobody\""), "{ran:?}");
    }
    site.runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_are_filtered_and_paged_and_families_shown() {
    let site = Site::open().await;
    site.play("family-1", "Family", "2").await;
    for n in 0..5 {
        site.play(&format!("greeting-{n}"), "Greeting", "Ada").await;
    }
    let page = site.json(&["list", "--name", "Greeting", "--limit", "3", "--text", "GREETING"]).await;
    let ids: Vec<&str> = page.iter().filter_map(|line| line["id"].as_str()).collect();
    let of_family = |id: &&str| id.contains("family");
    assert_eq!(ids.iter().filter(|id| !of_family(id)).count(), 3, "{page:?}");
    let cursor = page.last().unwrap()["cursor"].as_str().expect("there are more").to_owned();
    let rest = site.json(&["list", "--name", "Greeting", "--text", "greeting-", "--cursor", &cursor]).await;
    let mut both: Vec<String> =
        page.iter().chain(&rest).filter_map(|line| Some(line["id"].as_str()?.to_owned())).collect();
    both.sort();
    assert_eq!(both, (0..5).map(|n| format!("greeting-{n}")).collect::<Vec<_>>());
    assert!(site.json(&["list", "--status", "failed"]).await.is_empty());
    assert!(site.json(&["list", "--older-than", "1h"]).await.is_empty());
    let ran = site.run(&["list", "--older-than", "soon"]).await;
    assert_eq!(ran.code, 2);
    assert!(ran.err.contains("write 90s, 15m, 2h or 7d"), "{ran:?}");
    let ran = site.run(&["list", "--cursor", "rubbish"]).await;
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("is not a cursor"), "{ran:?}");
    let ran = site.run(&["list", "--name", ""]).await;
    assert_eq!(ran.code, 2, "an empty filter is no filter: {ran:?}");
    assert_eq!(site.json(&["list", "--all"]).await.len(), 8);
    let tree = site.json(&["tree", "family-1"]).await;
    let told: Vec<_> = tree.iter().map(|line| line["depth"].as_u64().unwrap()).collect();
    assert_eq!(told, [0, 1, 1], "{tree:?}");
    let ran = site.run(&["tree", "family-1"]).await;
    assert!(ran.out.starts_with("family-1  Family Completed\n  "), "{}", ran.out);
    site.runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_deletes_says_so_first_and_asks() {
    let site = Site::open().await;
    site.play("family-1", "Family", "2").await;
    site.play("countdown-1", "Countdown", "5").await;
    site.client.start_orchestration("order-1", "Order", "a book").await.unwrap();
    site.client.wait_for_status_change("order-1", 0, Duration::from_millis(20), PATIENCE).await.unwrap();
    let there = |site: &Site| {
        let provider = site.client.clone();
        async move { provider.list_all_instances().await.unwrap().len() }
    };
    assert_eq!(there(&site).await, 5);
    let ran = site.run(&["delete", "family-1"]).await;
    assert_eq!(ran.code, 1, "nobody is there to be asked");
    assert!(ran.err.contains("say --yes, or --dry-run"), "{ran:?}");
    let ran = site.run(&["delete", "family-1", "--dry-run"]).await;
    assert!(ran.out.contains("dry run: 3 instances would be deleted"), "{ran:?}");
    let ran = site.run(&["delete", "order-1", "--yes"]).await;
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("still runs"), "{ran:?}");
    let ran = site.run(&["purge", "--ended-before", "1h", "--yes"]).await;
    assert!(ran.out.contains("nothing has ended so long ago"), "{ran:?}");
    assert_eq!(there(&site).await, 5, "nothing has gone yet");
    let ran = site.run(&["prune", "countdown-1", "--keep-last", "2", "--status", "failed", "--yes"]).await;
    assert!(ran.err.contains("filters are for --all"), "{ran:?}");
    let ran = site.run(&["prune", "--all", "--keep-last", "2", "--dry-run"]).await;
    assert!(ran.out.contains("executions of 1 instances would be deleted"), "{ran:?}");
    let pruned = site.json(&["prune", "countdown-1", "--keep-last", "2", "--yes"]).await;
    assert!(pruned.last().unwrap()["deletedExecutions"].as_u64() >= Some(3), "{pruned:?}");
    let child = site.json(&["list", "--parent", "family-1"]).await[0]["id"].as_str().unwrap().to_owned();
    let ran = site.run(&["delete", &child, "--yes"]).await;
    assert!(ran.err.contains("a family goes as a whole"), "{ran:?}");
    let deleted = site.json(&["delete", "family-1", "family-1", "--yes"]).await;
    assert_eq!(deleted.last().unwrap()["deletedInstances"], 3, "{deleted:?}");
    let deleted = site.json(&["purge", "--ended-before", "0s", "--yes"]).await;
    assert_eq!(deleted.last().unwrap()["deletedInstances"], 1, "{deleted:?}");
    let deleted = site.json(&["delete", "order-1", "--force", "--yes"]).await;
    assert_eq!(deleted.last().unwrap()["deletedInstances"], 1);
    assert_eq!(there(&site).await, 0);
    site.runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_account_the_queues_and_the_fleet_are_told() {
    let site = Site::open().await;
    site.play("greeting-1", "Greeting", "Ada").await;
    let ran = site.run(&["check"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.out.lines().filter(|line| line.starts_with("ok ")).count(), 10, "{}", ran.out);
    assert!(!ran.out.contains(site.account.key()), "no key is shown");
    let ran = site.run(&["check", "--container", "elsewhere"]).await;
    assert_eq!(ran.code, 0, "a worker with a key would make it");
    assert!(ran.out.lines().any(|line| line.starts_with("poor ") && line.contains("container")), "{ran:?}");
    let mut command = tool(&["check"]);
    command.env("COSMOS_ENDPOINT", site.served.endpoint()).env("COSMOS_KEY", "d3Jvbmc=");
    let ran = finish(command).await;
    assert_eq!(ran.code, 1);
    assert!(ran.out.contains("WRONG    account") && !ran.out.contains("d3Jvbmc="), "{ran:?}");
    let ran = site.run(&["list", "--container", "elsewhere"]).await;
    assert_eq!(ran.code, 1, "a tool makes no container");
    let queues = site.json(&["queues"]).await;
    assert_eq!(queues[0]["queue"], "turns");
    let fleet = async {
        loop {
            let members = site.json(&["fleet"]).await;
            if members.iter().any(|member| !member["turns"].is_null() && !member["activities"].is_null()) {
                return members;
            }
        }
    };
    let members = tokio::time::timeout(PATIENCE, fleet).await.expect("the worker says that it is there");
    assert_eq!(members.len(), 1, "{members:?}");
    let ran = site.run(&["fleet"]).await;
    assert!(ran.out.contains("slots 0 to 255"), "{ran:?}");
    site.runtime.shutdown(None).await;
}

#[tokio::test]
async fn who_names_no_account_is_told_how_to_get_one_and_shells_get_completions() {
    let ran = finish(tool(&["completions", "bash"])).await;
    assert_eq!(ran.code, 0);
    assert!(ran.out.contains("complete -F") && ran.out.contains("purge"), "{}", ran.out);
    // Somebody may have a local account on that port.
    if std::net::TcpStream::connect("127.0.0.1:8081").is_err() {
        let ran = finish(tool(&["list"])).await;
        assert_eq!(ran.code, 1);
        assert!(ran.err.contains("cargo run -p duroxide-cosmos-emulator"), "{ran:?}");
    }
    let ran = finish(tool(&["list", "--status", "broken"])).await;
    assert_eq!(ran.code, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_doctor_says_what_is_wrong_and_mends_it_when_told_to() {
    let site = Site::open().await;
    site.play("well", "Family", "2").await;
    site.client.start_orchestration("order", "Order", "two books").await.unwrap();
    site.client.wait_for_status_change("order", 0, Duration::from_millis(20), PATIENCE).await.unwrap();
    let ran = site.run(&["doctor", "order"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("waits for event approval") && ran.out.contains("nothing is wrong"), "{ran:?}");
    assert_eq!(site.run(&["doctor", "nobody"]).await.code, 3);
    // Somebody deletes what says what the instance is.
    let client = site.account.client_named("vandal").await;
    let container = client.database_client("duroxide").container_client("duroxide", None).await.unwrap();
    container.delete_item("order", "instance", None).await.unwrap();
    let ran = site.run(&["doctor", "order"]).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("lost instance") && ran.out.contains("repair: make it from the history"), "{ran:?}");
    assert!(ran.out.contains("--repair mends 1"), "{ran:?}");
    // It asks first, and where nobody can answer it changes nothing.
    let ran = site.run(&["doctor", "--all", "--repair"]).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("say --yes"), "{ran:?}");
    let found = site.run(&["doctor", "--all", "--json"]).await;
    let lines: Vec<Value> = found.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((found.code, lines.len()), (1, 1), "{found:?}");
    assert_eq!((lines[0]["kind"].as_str(), lines[0]["instance"].as_str()), (Some("diagnosis"), Some("order")));
    let finding = &lines[0]["findings"][0];
    assert_eq!((finding["reason"].as_str(), finding["remedy"].as_str()), (Some("lostInstance"), Some("repair")));
    let ran = site.run(&["doctor", "--all", "--repair", "--yes"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("mended 1"), "{ran:?}");
    let ran = site.run(&["doctor", "--all"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("0 with something wrong"), "{ran:?}");
    // It goes on from where it was.
    site.run(&["raise", "order", "approval", "yes"]).await;
    let ran = site.run(&["wait", "order"]).await;
    assert_eq!((ran.code, ran.out.trim()), (0, "shipped two books"), "{ran:?}");
    site.runtime.shutdown(None).await;
}
