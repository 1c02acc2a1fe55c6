//! Commands whose output or errors cannot be written.

use crate::fixture::{finish, Fixture};
use duroxide::OrchestrationStatus;
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule};
use std::io::PipeWriter;

/// The writing end of a pipe without a reader.
fn pipe_without_reader() -> PipeWriter {
    std::io::pipe().expect("a pipe").1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_whose_output_has_no_reader_ends_without_an_error() {
    let fixture = Fixture::open().await;
    let runtime = fixture.start_worker().await;
    fixture.complete("greeting", "Greeting", "Ada").await;
    for arguments in [&["list"][..], &["list", "--json"], &["show", "greeting"], &["--help"], &["completions", "bash"]]
    {
        let mut command = fixture.cli(arguments);
        command.stdout(pipe_without_reader());
        let ran = finish(command).await;
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{arguments:?}: {ran:?}");
    }
    runtime.shutdown(None).await;
}

/// `2>&1 | head` ends the reader of the errors too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_without_a_reader_does_not_change_the_exit_code() {
    let fixture = Fixture::open().await;
    for (arguments, code) in [
        (&["show", "missing"][..], 3),
        (&["list", "--cursor", "rubbish"], 1),
        (&["doctor", "missing"], 3),
        (&["list", "--status", "broken"], 2),
    ] {
        let mut command = fixture.cli(arguments);
        command.stdout(pipe_without_reader()).stderr(pipe_without_reader());
        assert_eq!(finish(command).await.code, code, "{arguments:?}");
    }
    // The log goes to the same pipe.
    let mut command = fixture.cli(&["show", "missing"]);
    command.stdout(pipe_without_reader()).stderr(pipe_without_reader()).env("RUST_LOG", "trace");
    assert_eq!(finish(command).await.code, 3, "with a log");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_finishes_although_its_output_has_no_reader() {
    let fixture = Fixture::open().await;
    let runtime = fixture.start_worker().await;
    let instances: Vec<String> = (0..5).map(|n| format!("order-{n}")).collect();
    for instance in &instances {
        fixture.start_order(instance, "a book").await;
    }
    runtime.shutdown(None).await;
    for instance in &instances {
        fixture.delete_instance_document(instance).await;
    }
    // The first instance cannot be examined, so there is an error to print.
    let refused = WireAction::Refuse { status: 403, substatus: Some(5302), retry_after: None };
    let is_for_first = |request: &WireRequest<'_>| request.partition_key == Some("[\"order-0\"]");
    let rule = fixture.account.wire().add(WireRule::new(refused).on(RequestKind::Query).matching(is_for_first));
    let mut command = fixture.cli(&["doctor", "--all", "--repair", "--yes"]);
    command.stdout(pipe_without_reader()).stderr(pipe_without_reader());
    assert_eq!(finish(command).await.code, 1);
    assert!(rule.hits() > 0);
    for instance in &instances[1..] {
        let status = fixture.client.get_orchestration_status(instance).await.unwrap();
        assert!(matches!(status, OrchestrationStatus::Running { .. }), "{instance}: {status:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_finishes_although_the_disk_for_its_output_is_full() {
    let fixture = Fixture::open().await;
    let runtime = fixture.start_worker().await;
    fixture.start_order("order", "a book").await;
    runtime.shutdown(None).await;
    fixture.delete_instance_document("order").await;
    let mut command = fixture.cli(&["doctor", "order", "--repair", "--yes"]);
    command.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
    let ran = finish(command).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("the output can't be written"), "{ran:?}");
    let status = fixture.client.get_orchestration_status("order").await.unwrap();
    assert!(matches!(status, OrchestrationStatus::Running { .. }), "{status:?}");
}
