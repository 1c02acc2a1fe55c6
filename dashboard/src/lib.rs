//! A page to look at orchestrations on Azure Cosmos DB, and the little server that it comes from.
//!
//! One page, without a build step, and nothing is fetched from elsewhere: `assets/` is compiled in. It reads only, unless it is allowed to
//! change something. What users wrote (ids, inputs, errors) is shown as text, whatever is in it.
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

/// How the page is served.
#[derive(Clone, Debug, Default)]
pub struct Options {
    allow_changes: bool,
    token: Option<String>,
}

impl Options {
    /// Whether instances can be cancelled, told events, mended and deleted from the page. Not by default.
    pub fn with_changes(mut self, allowed: bool) -> Self {
        self.allow_changes = allowed;
        self
    }

    /// Who looks must have this token: the page is opened with `#token=…` behind its address.
    pub fn with_token(mut self, token: Option<String>) -> Self {
        self.token = token;
        self
    }
}

/// What the handlers share.
pub(crate) struct Shared {
    provider: Arc<CosmosDBProvider>,
    client: Client,
    allow_changes: bool,
    trend: trend::Trend,
    overview: api::Overview,
}

/// Serves the page until `stop` ends. Refused where others can reach the address and there is no token.
pub async fn serve(
    listener: TcpListener,
    provider: Arc<CosmosDBProvider>,
    options: Options,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() && options.token.as_ref().is_none_or(String::is_empty) {
        let says = format!("others can reach {address}: give a token that they must have, or listen on 127.0.0.1");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, says));
    }
    let shared = Arc::new(Shared {
        client: Client::new(provider.clone()),
        provider,
        allow_changes: options.allow_changes,
        trend: trend::Trend::default(),
        overview: api::Overview::default(),
    });
    let guard = Guard::new(options.token.filter(|token| !token.is_empty()));
    let served = axum::serve(listener, router(shared.clone(), guard)).with_graceful_shutdown(stop);
    tokio::select! {
        served = async { served.await } => served,
        () = trend::follow(&shared) => Ok(()),
    }
}

fn router(shared: Arc<Shared>, guard: Guard) -> Router {
    let questions = Router::new()
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
    let api = questions.merge(changes).with_state(shared);
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
    /// Whatever an instance is called, it is text: the page makes elements and gives them text, and never reads markup.
    #[test]
    fn the_page_has_no_way_to_read_markup_or_to_fetch_from_elsewhere() {
        // The name of a kind of elements, which nobody fetches.
        let script = include_str!("../assets/dashboard.js").replace("http://www.w3.org/2000/svg", "");
        let ways = [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http:",
            "https:",
        ];
        for way in ways {
            assert!(!script.contains(way), "{way}");
        }
        for file in [include_str!("../assets/dashboard.html"), include_str!("../assets/dashboard.css")] {
            assert!(!file.contains("http") && !file.contains("onclick") && !file.contains("@import"), "{file}");
        }
    }
}
