//! The program itself.

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
fn it_says_where_it_listens_and_which_key_to_use() {
    let mut program =
        Command::new(PROGRAM).args(["--port", "0", "--key", "a2V5"]).stdout(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(program.stdout.take().unwrap());
    let said: Vec<String> = output.lines().map_while(Result::ok).take(7).collect();
    program.kill().unwrap();
    program.wait().unwrap();
    let said = said.join("\n");
    assert!(said.contains("nothing is kept on disk"), "{said}");
    assert!(said.contains("COSMOS_ENDPOINT=http://127.0.0.1:"), "{said}");
    assert!(said.contains("COSMOS_KEY=a2V5"), "{said}");
}

#[test]
fn a_key_that_is_not_base64_is_refused() {
    let output = Command::new(PROGRAM).args(["--port", "0", "--key", "not base64"]).output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("base64"), "{message}");
}

#[test]
fn a_misbehaviour_that_is_unknown_is_refused_with_the_list() {
    let output = Command::new(PROGRAM).args(["--port", "0", "--misbehave", "explode"]).output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("batches-not-atomic"), "{message}");
}

#[test]
fn it_says_how_it_misbehaves() {
    let options = ["--port", "0", "--misbehave", "empty-pages", "--misbehave", "slow-pages=4s"];
    let mut program = Command::new(PROGRAM).args(options).stdout(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(program.stdout.take().unwrap());
    let said: Vec<String> = output.lines().map_while(Result::ok).take(9).collect();
    program.kill().unwrap();
    program.wait().unwrap();
    assert_eq!(said[7..], ["Misbehaves: empty-pages", "Misbehaves: slow-pages=4000ms"]);
}
