//! The page.

use crate::{account::Account, output::Output, End, Result};
use anyhow::{ensure, Context};
use clap::Args;
use duroxide_cosmos_dashboard::{serve, Options};
use serde_json::json;
use std::net::SocketAddr;
use tokio::net::TcpListener;

#[derive(Args)]
pub struct Serve {
    /// Where to listen; port 0 takes any that is free. Where others can reach it, --token is needed
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8090")]
    listen: SocketAddr,
    /// Who looks must have this token
    #[arg(long, env = "DUROXIDE_COSMOS_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Lets those who look cancel, mend and delete instances and raise events. Changes
    #[arg(long)]
    allow_changes: bool,
}

impl Serve {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let Self { listen, token, allow_changes } = self;
        ensure!(token.as_ref().is_none_or(|token| token.len() >= 8), "a token has eight characters at least");
        ensure!(
            listen.ip().is_loopback() || token.is_some(),
            "others can reach {listen}: give a token that they must have with --token, or listen on 127.0.0.1"
        );
        let listener = TcpListener::bind(listen).await;
        let listener =
            listener.with_context(|| format!("can't listen on {listen}; choose another place with --listen"))?;
        let address = listener.local_addr()?;
        let behind = if token.is_some() { "#token=<token>" } else { "" };
        output.object("serving", &json!({ "address": format!("http://{address}/"), "allowChanges": allow_changes }));
        output.line(format!("open http://{address}/{behind}   (Ctrl-C ends it)"));
        let options = Options::default().with_changes(allow_changes).with_token(token);
        serve(listener, account.provider.clone(), options, stop()).await?;
        Ok(End::Done)
    }
}

/// Until somebody has had enough.
async fn stop() {
    if let Err(error) = tokio::signal::ctrl_c().await {
        tracing::warn!(%error, "can't wait for Ctrl-C");
        std::future::pending::<()>().await;
    }
}
