//! The SDK's transport for clients in the same process: it sends requests to the wire.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use azure_data_cosmos_driver::diagnostics::RequestSentStatus;
use azure_data_cosmos_driver::error::{status_codes, CosmosStatus};
use azure_data_cosmos_driver::test::{
    ConnectionPoolOptions, HttpClientConfig, HttpClientFactory, HttpRequest, HttpResponse, TransportClient,
    TransportError,
};
use azure_data_cosmos_driver::{CosmosError, Result};

use crate::answer::{Answer, NoAnswer};
use crate::request::{classify, segments, Outgoing};
use crate::wire::Wire;

/// Connects the SDK runtime of one named client to the wire.
pub(crate) struct WireFactory {
    pub wire: Arc<Wire>,
    pub client: Arc<str>,
}

impl HttpClientFactory for WireFactory {
    fn build(&self, pool: &ConnectionPoolOptions, _config: HttpClientConfig) -> Result<Arc<dyn TransportClient>> {
        Ok(Arc::new(WireTransport {
            wire: Arc::clone(&self.wire),
            client: Arc::clone(&self.client),
            item_timeout: pool.max_dataplane_request_timeout(),
            metadata_timeout: pool.max_metadata_request_timeout(),
        }))
    }
}

impl fmt::Debug for WireFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WireFactory({})", self.client)
    }
}

struct WireTransport {
    wire: Arc<Wire>,
    client: Arc<str>,
    item_timeout: Duration,
    metadata_timeout: Duration,
}

impl WireTransport {
    /// Returns the timeout of a request. As the SDK's own HTTP client, it has one for metadata and one for items.
    fn timeout(&self, request: &HttpRequest) -> Duration {
        let segments = segments(request.url.path());
        let kind = classify(request.method, &segments, &request.headers);
        request.timeout.unwrap_or(if kind.is_metadata() { self.metadata_timeout } else { self.item_timeout })
    }
}

#[async_trait]
impl TransportClient for WireTransport {
    async fn send(&self, request: &HttpRequest) -> std::result::Result<HttpResponse, TransportError> {
        let outgoing = Outgoing {
            client: Some(Arc::clone(&self.client)),
            method: request.method,
            url: request.url.clone(),
            headers: request.headers.clone(),
            body: request.body.clone().unwrap_or_default(),
        };
        let answer = self.wire.send(outgoing);
        let outcome = tokio::time::timeout(self.timeout(request), answer).await;
        outcome.unwrap_or(Err(NoAnswer::AnswerLost)).map(to_response).map_err(to_error)
    }
}

impl fmt::Debug for WireTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WireTransport({})", self.client)
    }
}

fn to_response(answer: Answer) -> HttpResponse {
    HttpResponse { status: answer.status, headers: answer.headers, body: answer.body.to_vec() }
}

/// Returns the error that the SDK's HTTP client reports for a connection that fails, breaks or times out.
fn to_error(no_answer: NoAnswer) -> TransportError {
    let error = |status: CosmosStatus, message: &'static str| {
        let builder = CosmosError::builder().with_status(status);
        builder.with_message(message).build()
    };
    match no_answer {
        NoAnswer::NotSent => TransportError::new(
            error(status_codes::TRANSPORT_CONNECTION_FAILED, "the connection failed"),
            RequestSentStatus::NotSent,
        ),
        NoAnswer::AnswerLost => TransportError::new(
            error(status_codes::TRANSPORT_IO_FAILED, "the answer was lost"),
            RequestSentStatus::Unknown,
        ),
        NoAnswer::Unroutable(error) => TransportError::new(*error, RequestSentStatus::Unknown),
    }
}
