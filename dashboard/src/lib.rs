//! The dashboard for orchestrations on Azure Cosmos DB, and its HTTP server.
//!
//! - The files in `assets/` are compiled in and need no build step. The browser loads nothing from elsewhere.
//! - The dashboard reads only, unless [`Options::with_changes`] allows changes.
//! - Ids, inputs and errors are shown as text, never as markup.
//!
//! ```no_run
//! # async fn show(provider: duroxide_cosmos::CosmosDBProvider) -> std::io::Result<()> {
//! use duroxide_cosmos_dashboard::{serve, Options};
//!
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8090").await?;
//! serve(listener, std::sync::Arc::new(provider), Options::default(), std::future::pending()).await
//! # }
//! ```

mod api;
mod guard;
pub mod instance;
pub mod timeline;
mod trend;

use axum::{
    http::header,
    response::IntoResponse,
    routing::{get, post},
    Router,
};
use duroxide::Client;
use duroxide_cosmos::CosmosDBProvider;
use guard::Guard;
use std::{future::Future, io, sync::Arc};
use tokio::net::TcpListener;

/// The options of the server.
#[derive(Clone, Debug, Default)]
pub struct Options {
    allow_changes: bool,
    token: Option<String>,
}

impl Options {
    /// Allows users to raise events and to cancel, repair and delete instances. Off by default.
    #[must_use]
    pub fn with_changes(mut self, allowed: bool) -> Self {
        self.allow_changes = allowed;
        self
    }

    /// Requires this token for every request for data. Users open the dashboard with `#token=…` behind its address.
    #[must_use]
    pub fn with_token(mut self, token: Option<String>) -> Self {
        self.token = token;
        self
    }
}

/// The state that the handlers share.
pub(crate) struct Shared {
    provider: Arc<CosmosDBProvider>,
    client: Client,
    allow_changes: bool,
    trend: trend::Trend,
    overview: api::CachedOverview,
}

/// Serves the dashboard until `stop` ends.
///
/// Fails if other machines can reach the address and the options have no token.
pub async fn serve(
    listener: TcpListener,
    provider: Arc<CosmosDBProvider>,
    options: Options,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() && options.token.as_ref().is_none_or(String::is_empty) {
        let message = format!("other machines can reach {address}: set a token, or listen on 127.0.0.1");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let shared = Arc::new(Shared {
        client: Client::new(provider.clone()),
        provider,
        allow_changes: options.allow_changes,
        trend: trend::Trend::default(),
        overview: api::CachedOverview::default(),
    });
    let guard = Guard::new(options.token.filter(|token| !token.is_empty()));
    let served = axum::serve(listener, router(shared.clone(), guard)).with_graceful_shutdown(stop);
    tokio::select! {
        served = async { served.await } => served,
        () = trend::record(&shared) => Ok(()),
    }
}

fn router(shared: Arc<Shared>, guard: Guard) -> Router {
    let reads = Router::new()
        .route("/overview", get(api::overview))
        .route("/instances", get(api::instances))
        .route("/instance", get(api::instance))
        .route("/history", get(api::history))
        .route("/entry", get(api::entry))
        .route("/tree", get(api::tree))
        .route("/doctor", get(api::doctor));
    let changes = Router::new()
        .route("/cancel", post(api::cancel))
        .route("/raise", post(api::raise))
        .route("/repair", post(api::repair))
        .route("/delete", post(api::delete));
    let api = reads.merge(changes).with_state(shared);
    let file = |kind: &'static str, text: &'static str| get(move || async move { asset(kind, text) });
    let api = api.layer(axum::middleware::from_fn_with_state(Arc::new(guard), guard::check));
    Router::new()
        .route("/", file("text/html; charset=utf-8", include_str!("../assets/dashboard.html")))
        .route("/dashboard.js", file("text/javascript; charset=utf-8", include_str!("../assets/dashboard.js")))
        .route("/dashboard.css", file("text/css; charset=utf-8", include_str!("../assets/dashboard.css")))
        .nest("/api", api)
        .layer(axum::middleware::map_response(guard::harden))
}

fn asset(kind: &'static str, text: &'static str) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, kind)], text)
}

#[cfg(test)]
mod tests {
    /// Instance ids are shown as text: the script creates elements, sets their text, and never parses markup.
    #[test]
    fn the_script_cannot_parse_markup_or_load_from_elsewhere() {
        // This address is the name of a namespace. The browser does not load it.
        let script = include_str!("../assets/dashboard.js").replace("http://www.w3.org/2000/svg", "");
        let forbidden = [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http:",
            "https:",
        ];
        for text in forbidden {
            assert!(!script.contains(text), "{text}");
        }
        for file in [include_str!("../assets/dashboard.html"), include_str!("../assets/dashboard.css")] {
            assert!(!file.contains("http") && !file.contains("onclick") && !file.contains("@import"), "{file}");
        }
    }
}
