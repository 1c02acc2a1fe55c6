//! `check`, `queues`, `workers`, `completions`, and the choice of the account.

use crate::fixture::{cli, finish, Fixture, PATIENCE};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_prints_one_line_per_test_and_never_the_key() {
    let fixture = Fixture::open().await;
    let ran = fixture.run(&["check"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.out.lines().filter(|line| line.starts_with("ok ")).count(), 10, "{}", ran.out);
    assert!(!ran.out.contains(fixture.account.key()), "the key is not printed");
    let ran = fixture.run(&["check", "--container", "elsewhere"]).await;
    assert_eq!(ran.code, 0, "a worker with a key creates the container");
    assert!(ran.out.lines().any(|line| line.starts_with("warning ") && line.contains("container")), "{ran:?}");
    let mut command = cli(&["check"]);
    command.env("COSMOS_ENDPOINT", fixture.served.endpoint()).env("COSMOS_KEY", "d3Jvbmc=");
    let ran = finish(command).await;
    assert_eq!(ran.code, 1);
    assert!(ran.out.contains("failed   account") && !ran.out.contains("d3Jvbmc="), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_does_not_create_a_container() {
    let fixture = Fixture::open().await;
    assert_eq!(fixture.run(&["list", "--container", "elsewhere"]).await.code, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_queues_and_the_workers_are_shown() {
    let fixture = Fixture::open().await;
    let runtime = fixture.start_worker().await;
    fixture.complete("greeting-1", "Greeting", "Ada").await;
    let queues = fixture.json(&["queues"]).await;
    assert_eq!(queues[0]["queue"], "turns");
    let registered = async {
        loop {
            let workers = fixture.json(&["workers"]).await;
            if workers.iter().any(|worker| !worker["turns"].is_null() && !worker["activities"].is_null()) {
                return workers;
            }
        }
    };
    let workers = tokio::time::timeout(PATIENCE, registered).await.expect("the worker registers");
    assert_eq!(workers.len(), 1, "{workers:?}");
    assert_eq!(workers[0]["kind"], "worker");
    let ran = fixture.run(&["workers"]).await;
    assert!(ran.out.contains("slots 0 to 255"), "{ran:?}");
    runtime.shutdown(None).await;
}

#[tokio::test]
async fn completions_need_no_account() {
    let ran = finish(cli(&["completions", "bash"])).await;
    assert_eq!(ran.code, 0);
    assert!(ran.out.contains("complete -F") && ran.out.contains("purge"), "{}", ran.out);
}

#[tokio::test]
async fn a_command_without_an_account_prints_how_to_get_one() {
    // The machine may run a local account on that port.
    if std::net::TcpStream::connect("127.0.0.1:8081").is_err() {
        let ran = finish(cli(&["list"])).await;
        assert_eq!(ran.code, 1);
        assert!(ran.err.contains("cargo run -p duroxide-cosmos-emulator"), "{ran:?}");
    }
    let ran = finish(cli(&["list", "--status", "broken"])).await;
    assert_eq!(ran.code, 2, "the command line is checked first");
}
