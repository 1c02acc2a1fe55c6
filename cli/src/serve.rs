//! `serve`: serves the dashboard.

use crate::{account::Account, output::Output, Outcome, Result};
use anyhow::{ensure, Context};
use clap::Args;
use duroxide_cosmos_dashboard::{serve, Options};
use serde_json::json;
use std::net::SocketAddr;
use tokio::net::TcpListener;

#[derive(Args)]
pub struct Serve {
    /// The address and port; port 0 takes a free port. An address that other machines can reach needs --token
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8090")]
    listen: SocketAddr,
    /// The token that every request must carry, at least eight characters
    #[arg(long, env = "DUROXIDE_COSMOS_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Lets users cancel, repair and delete instances and raise events. Modifies data
    #[arg(long)]
    allow_changes: bool,
}

impl Serve {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let Self { listen, token, allow_changes } = self;
        ensure!(token.as_ref().is_none_or(|token| token.len() >= 8), "a token needs at least eight characters");
        ensure!(
            listen.ip().is_loopback() || token.is_some(),
            "other machines can reach {listen}: set a token with --token, or listen on 127.0.0.1"
        );
        let listener = TcpListener::bind(listen).await;
        let listener =
            listener.with_context(|| format!("can't listen on {listen}; choose another address with --listen"))?;
        let address = listener.local_addr()?;
        let fragment = if token.is_some() { "#token=<token>" } else { "" };
        output.object("serving", &json!({ "address": format!("http://{address}/"), "allowChanges": allow_changes }));
        output.line(format!("open http://{address}/{fragment}   (Ctrl-C stops the server)"));
        let options = Options::default().with_changes(allow_changes).with_token(token);
        serve(listener, account.provider.clone(), options, stop_signal()).await?;
        Ok(Outcome::Done)
    }
}

/// Waits for Ctrl-C.
async fn stop_signal() {
    if let Err(error) = tokio::signal::ctrl_c().await {
        tracing::warn!(%error, "can't wait for Ctrl-C");
        std::future::pending::<()>().await;
    }
}
