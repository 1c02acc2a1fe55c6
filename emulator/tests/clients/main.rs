//! Tests the local account with Microsoft's Python and JavaScript clients.
//!
//! Each script runs the same checks with one client. `.ci/clients` installs the clients in the build directory. If a
//! client is missing, its test is skipped, unless `DUROXIDE_COSMOS_CLIENTS=required` is set.

use std::env;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use duroxide_cosmos_emulator::{LocalAccount, RequestKind};
use tokio::process::Command;
use tokio::time::timeout;

const PARTITIONS: u32 = 4;

/// How long a script may take. A client that waits for an answer forever must not block the tests.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(120);

/// The checks that each script runs, in this order.
const CHECKS: [&str; 25] = [
    "a container keeps its settings",
    "an item is created read replaced upserted and deleted",
    "a second create is refused",
    "a replace needs the current etag",
    "an absent item is not found",
    "a batch answers with the etags of its items",
    "a batch with a duplicate applies nothing",
    "a batch with a stale etag applies nothing",
    "a batch with an absent item applies nothing",
    "a batch takes current etags",
    "a batch of 100 operations is applied",
    "a batch of 101 operations is refused",
    "a query in one partition takes parameters",
    "strings stand in single quotes",
    "strings stand in double quotes",
    "pages across partitions have each row once",
    "rows across partitions come in ascending order",
    "rows across partitions come in descending order",
    "rows across partitions are counted",
    "a reserved word after a dot is refused",
    "a reserved word stands in brackets",
    "a filter on an unindexed path is refused",
    "a scan filters on an unindexed path",
    "answers name their request charge",
    "a wrong key is refused",
];

#[tokio::test]
async fn microsofts_python_client_works_with_the_local_account() {
    if is_installed("azure-cosmos for Python", has_python_package()) {
        let python = clients_dir().join("venv/bin/python");
        run_checks("python", &python, "clients.py").await;
    }
}

#[tokio::test]
async fn microsofts_javascript_client_works_with_the_local_account() {
    let package = clients_dir().join("node_modules/@azure/cosmos/package.json");
    if is_installed("@azure/cosmos for JavaScript", package.exists()) {
        run_checks("javascript", Path::new("node"), "clients.mjs").await;
    }
}

/// Returns the directory in which `.ci/clients` installs the clients: inside the build directory.
fn clients_dir() -> PathBuf {
    // Cargo's directory for files of tests is inside the build directory.
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("clients")
}

/// Whether the Python environment has the package. A failed installation leaves an environment without it.
fn has_python_package() -> bool {
    let Ok(versions) = clients_dir().join("venv/lib").read_dir() else { return false };
    let package = "site-packages/azure/cosmos/__init__.py";
    versions.flatten().any(|version| version.path().join(package).exists())
}

/// Whether to run a client's checks.
fn is_installed(client: &str, found: bool) -> bool {
    let required = env::var("DUROXIDE_COSMOS_CLIENTS").is_ok_and(|value| value == "required");
    assert!(found || !required, "{client} is required but not installed: run .ci/clients");
    if !found {
        println!("skipped: {client} is not installed. Install it with .ci/clients");
    }
    found
}

/// Serves an account and runs a script against it. The script creates `database`.
async fn run_checks(database: &str, program: &Path, script: &str) {
    let account = LocalAccount::builder().with_partitions(PARTITIONS).build();
    let served = account.serve(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await.unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(script);
    let run = Command::new(program)
        .arg(script)
        .env("COSMOS_ENDPOINT", served.endpoint())
        .env("COSMOS_KEY", account.key())
        .env("CLIENTS_DIR", clients_dir())
        .kill_on_drop(true)
        .output();
    let output = timeout(SCRIPT_TIMEOUT, run).await.expect("the script ends in time").expect("the script can be run");
    assert_all_passed(&output);
    assert_account_was_used(&account, database);
    served.shutdown().await;
}

/// Compares the names of the checks too: a script that checks nothing also exits with 0.
fn assert_all_passed(output: &Output) {
    let printed = String::from_utf8_lossy(&output.stdout);
    let reasons = String::from_utf8_lossy(&output.stderr);
    let failed: Vec<&str> = printed.lines().filter_map(|line| line.strip_prefix("FAILED ")).collect();
    assert!(failed.is_empty(), "{} of {} checks failed:\n{reasons}", failed.len(), CHECKS.len());
    let passed: Vec<&str> = printed.lines().filter_map(|line| line.strip_prefix("ok ")).collect();
    assert_eq!(passed, CHECKS, "{reasons}");
    assert!(output.status.success(), "{}: {reasons}", output.status);
}

/// The checks used this account, in a container with several physical partitions.
fn assert_account_was_used(account: &LocalAccount, database: &str) {
    assert_eq!(account.partition_count(database, "items"), PARTITIONS as usize);
    let stats = account.stats();
    for kind in [
        RequestKind::Create,
        RequestKind::Upsert,
        RequestKind::Replace,
        RequestKind::Delete,
        RequestKind::Read,
        RequestKind::Query,
        RequestKind::Batch,
    ] {
        assert!(stats.of(kind).requests > 0, "the client sent no {kind}");
    }
}
