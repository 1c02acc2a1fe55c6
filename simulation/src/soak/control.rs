//! The control endpoint of the served account.

use std::net::SocketAddr;

use anyhow::{bail, Context, Result};
use serde_json::{json, Value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A client of the control endpoint.
#[derive(Clone, Debug)]
pub struct Control {
    addr: SocketAddr,
}

impl Control {
    /// The control endpoint of the account at this address.
    pub fn at(addr: SocketAddr) -> Self {
        Self { addr }
    }

    /// Adds a fault rule.
    pub async fn add_fault(&self, rule: &Value) -> Result<()> {
        self.call("POST", "faults", rule).await.map(|_| ())
    }

    /// Removes all fault rules. Returns how many requests each has hit, in the order in which they were added.
    pub async fn clear_faults(&self) -> Result<Vec<u64>> {
        let answer = self.call("DELETE", "faults", &Value::Null).await?;
        Ok(serde_json::from_value(answer["hits"].clone())?)
    }

    /// Splits a physical partition.
    pub async fn split(&self, database: &str, container: &str, partition: u32) -> Result<()> {
        let body = json!({ "database": database, "container": container, "partition": partition });
        self.call("POST", "split", &body).await.map(|_| ())
    }

    /// Sends one request on a connection of its own. Requests are seconds apart and need no client library.
    async fn call(&self, method: &str, path: &str, body: &Value) -> Result<Value> {
        let body = body.to_string();
        let head = format!("{method} /_emulator/{path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.addr);
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        let mut stream = TcpStream::connect(self.addr).await.context("the account does not accept connections")?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (head, body) = answer.split_once("\r\n\r\n").context("the answer of the account is not HTTP")?;
        let status = head.split(' ').nth(1).unwrap_or_default();
        if !status.starts_with('2') {
            bail!("{method} {path} was answered with {status}: {body}");
        }
        Ok(serde_json::from_str(body)?)
    }
}
