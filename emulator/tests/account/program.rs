//! The program: its messages and exit codes.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_duroxide-cosmos-emulator");

#[test]
fn a_port_in_use_is_a_clear_error() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = Command::new(PROGRAM).args(["--port", &port]).output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("is in use"), "{message}");
    assert!(message.contains("--port"), "{message}");
}

#[test]
fn a_remote_address_is_refused() {
    let output = Command::new(PROGRAM).args(["--host", "0.0.0.0", "--port", "0"]).output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("loopback"), "{message}");
}

#[test]
fn the_program_prints_its_endpoint_and_key() {
    let mut program =
        Command::new(PROGRAM).args(["--port", "0", "--key", "a2V5"]).stdout(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(program.stdout.take().unwrap());
    let printed: Vec<String> = output.lines().map_while(Result::ok).take(7).collect();
    program.kill().unwrap();
    program.wait().unwrap();
    let printed = printed.join("\n");
    assert!(printed.contains("stores nothing on disk"), "{printed}");
    assert!(printed.contains("COSMOS_ENDPOINT=http://127.0.0.1:"), "{printed}");
    assert!(printed.contains("COSMOS_KEY=a2V5"), "{printed}");
}

#[test]
fn a_key_that_is_not_base64_is_refused() {
    let output = Command::new(PROGRAM).args(["--port", "0", "--key", "not base64"]).output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("base64"), "{message}");
}

#[test]
fn an_unknown_misbehaviour_is_refused_with_the_list() {
    let output = Command::new(PROGRAM).args(["--port", "0", "--misbehave", "explode"]).output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("batches-not-atomic"), "{message}");
}

#[test]
fn the_program_prints_its_misbehaviours() {
    let options = ["--port", "0", "--misbehave", "empty-pages", "--misbehave", "slow-pages=4s"];
    let mut program = Command::new(PROGRAM).args(options).stdout(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(program.stdout.take().unwrap());
    let printed: Vec<String> = output.lines().map_while(Result::ok).take(9).collect();
    program.kill().unwrap();
    program.wait().unwrap();
    assert_eq!(printed[7..], ["Misbehaviour: empty-pages", "Misbehaviour: slow-pages=4000ms"]);
}
