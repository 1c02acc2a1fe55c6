//! The examples as a user runs them: their output, their refusals, and several of them on one account.
//!
//! `cargo test` builds them. To run only this program, run `cargo build --examples` first.

use duroxide::{Client, OrchestrationStatus};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, Served};
use std::{
    net::Ipv4Addr,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    time::Duration,
};

/// The command for an example, without environment variables that name an account.
fn example(name: &str) -> Command {
    let this = std::env::current_exe().unwrap();
    let profile = this.parent().and_then(|deps| deps.parent()).unwrap();
    let path: PathBuf = profile.join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(path.exists(), "run `cargo build --examples` first: {name} is not built");
    let mut command = Command::new(path);
    for (variable, _) in std::env::vars() {
        if ["COSMOS_", "AZURE_", "WORKER_", "RUST_LOG"].iter().any(|prefix| variable.starts_with(prefix)) {
            command.env_remove(variable);
        }
    }
    command.stdin(Stdio::null());
    command
}

fn run(name: &str, arguments: &[&str]) -> Output {
    example(name).args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[track_caller]
fn succeeds(output: &Output, parts: &[&str]) -> String {
    let text = text(output);
    assert!(output.status.success(), "{text}");
    says(&text, parts);
    text
}

#[track_caller]
fn fails(output: &Output, parts: &[&str]) {
    let text = text(output);
    assert!(!output.status.success(), "{text}");
    says(&text, parts);
    assert!(!text.contains("panicked"), "{text}");
}

#[track_caller]
fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn hello_world_prints_its_result_and_its_cost() {
    succeeds(&run("hello_world", &["Ada"]), &["Hello, Ada!", " requests, ", " RU"]);
}

#[test]
fn hello_world_says_what_is_wrong_with_the_environment() {
    let output = example("hello_world").env("COSMOS_ENDPOINT", "myaccount").output().unwrap();
    fails(&output, &["error: the endpoint (COSMOS_ENDPOINT) is not a URL like https://<account>.documents.azure.com/"]);
}

#[test]
fn fan_out_shows_its_progress() {
    succeeds(
        &run("fan_out", &["--items", "30", "--wave", "10"]),
        &["10 of 30", "20 of 30", "the sum of 30 squares is 9455"],
    );
}

#[test]
fn a_session_loads_its_board_once() {
    let text = succeeds(&run("sessions", &["--games", "3", "--moves", "2"]), &[]);
    let of = |what: &str| -> u32 {
        let words: Vec<&str> =
            text.lines().filter(|line| line.contains(" loaded ")).flat_map(str::split_whitespace).collect();
        words.windows(2).filter(|pair| pair[1] == what).map(|pair| pair[0].parse::<u32>().unwrap()).sum()
    };
    assert_eq!((of("boards"), of("moves")), (3, 12), "{text}");
}

#[test]
fn entra_id_signs_in_with_a_token_of_its_own_and_reports_a_missing_endpoint() {
    succeeds(&run("entra_id", &[]), &["token credential of the application", "Hello, Entra ID!"]);
    fails(&run("entra_id", &["managed-identity"]), &["set COSMOS_ENDPOINT"]);
    fails(&run("entra_id", &["passport"]), &["unrecognized subcommand 'passport'"]);
}

mod on_a_shared_account {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    struct Shared {
        account: LocalAccount,
        served: Served,
    }

    impl Shared {
        async fn new() -> Self {
            let account = LocalAccount::new();
            let served = account.serve((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
            Self { account, served }
        }

        fn example(&self, name: &str) -> Command {
            let mut command = super::example(name);
            command.env("COSMOS_ENDPOINT", self.served.endpoint()).env("COSMOS_KEY", self.account.key());
            command
        }

        /// A client that starts orchestrations for the workers.
        async fn client(&self) -> Client {
            let key = Credential::account_key(self.account.key().to_owned());
            let config = CosmosDBProviderConfig::default().with_endpoint(self.served.endpoint()).with_credential(key);
            Client::new(Arc::new(CosmosDBProvider::new_with_config(config).await.unwrap()))
        }
    }

    /// A process that does not outlive its test.
    struct Running(Option<Child>);

    impl Running {
        fn start(mut command: Command) -> Self {
            Self(Some(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()))
        }

        /// Sends a signal and waits for the end.
        #[cfg(unix)]
        async fn stop(mut self, signal: &str) -> Output {
            let child = self.0.take().unwrap();
            assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
            tokio::task::spawn_blocking(|| child.wait_with_output().unwrap()).await.unwrap()
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            if let Some(child) = &mut self.0 {
                child.kill().expect("it can be killed");
                child.wait().expect("it ends");
            }
        }
    }

    #[cfg(unix)]
    #[tokio::test(flavor = "multi_thread")]
    async fn workers_do_the_work_and_stop_when_told() {
        let shared = Shared::new().await;
        let workers = [Running::start(shared.example("worker")), Running::start(shared.example("worker"))];
        let client = shared.client().await;
        for (id, orchestration, input) in [("g", "Greeting", "Ada"), ("b", "Batch", "4"), ("o", "Order", "two books")] {
            client.start_orchestration(id, orchestration, input).await.unwrap();
        }
        // The orchestration waits for approval. duroxide drops an event that arrives before that.
        client.wait_for_status_change("o", 0, Duration::from_millis(20), PATIENCE).await.unwrap();
        client.raise_event("o", "approval", "yes").await.unwrap();
        for (id, result) in [("g", "Hello, Ada!"), ("b", "4 of 4 items done"), ("o", "shipped two books")] {
            match client.wait_for_orchestration(id, PATIENCE).await.unwrap() {
                OrchestrationStatus::Completed { output, .. } => assert_eq!(output, result),
                other => panic!("{id}: {other:?}"),
            }
        }
        for worker in workers {
            let output = worker.stop("-TERM").await;
            let text = succeeds(&output, &["the account and its container can be used", "SIGTERM", "stopped"]);
            assert!(!text.contains(shared.account.key()), "{text}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_worker_with_the_wrong_key_does_not_start() {
        let shared = Shared::new().await;
        let mut command = shared.example("worker");
        command.env("COSMOS_KEY", "d3Jvbmc=");
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        fails(&output, &["error: opening http://127.0.0.1", "access denied with account key"]);
    }
}
