//! The HTTP server of the account, on loopback.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use azure_core::http::{
    headers::{HeaderName, Headers},
    Method, Url,
};
use azure_core::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use serde_json::{json, Value};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::account::LocalAccount;
use crate::answer::{Answer, NoAnswer};
use crate::auth::{self, Credential};
use crate::control;
use crate::request::Outgoing;

const USER_AGENT: HeaderName = HeaderName::from_static("user-agent");
const HOST: HeaderName = HeaderName::from_static("host");

/// The largest body that the server reads. The emulator itself refuses much smaller ones with 413.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

/// How long the server waits for requests in flight when it stops. A request at a closed gate would never end.
const GRACE: Duration = Duration::from_secs(1);

/// A running HTTP server of an account. It stops when this value is shut down or dropped.
pub struct Served {
    addr: SocketAddr,
    server: Arc<Server>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Served {
    /// Returns the address that the server listens on.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the account's endpoint, for `COSMOS_ENDPOINT`.
    pub fn endpoint(&self) -> String {
        format!("http://{}/", self.addr)
    }

    /// Returns the bearer tokens that clients have sent, accepted or not, in order of arrival and without duplicates.
    pub fn tokens_seen(&self) -> Vec<String> {
        self.server.with_tokens(|tokens| tokens.clone())
    }

    /// Stops listening, waits up to one second for requests in flight, and closes the connections.
    pub async fn shutdown(self) {
        self.stop.cancel();
        self.tasks.wait().await;
    }
}

/// Leaves out the tokens.
impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served").field("addr", &self.addr).finish_non_exhaustive()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct Server {
    account: LocalAccount,
    /// The name of the client, if this address serves only one.
    client: Option<Arc<str>>,
    tokens: Mutex<Vec<String>>,
}

/// Binds the address and starts the server.
pub(crate) async fn serve(account: LocalAccount, addr: SocketAddr, client: Option<&str>) -> io::Result<Served> {
    if !addr.ip().is_loopback() {
        let message = format!(
            "{addr} is not a loopback address; the local account serves only this machine, so use 127.0.0.1 or ::1"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let listener = TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    let server = Arc::new(Server { account, client: client.map(Arc::from), tokens: Mutex::default() });
    let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
    tasks.spawn(accept(listener, Arc::clone(&server), stop.clone(), tasks.clone()));
    tasks.close();
    Ok(Served { addr, server, stop, tasks })
}

async fn accept(listener: TcpListener, server: Arc<Server>, stop: CancellationToken, tasks: TaskTracker) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                tasks.spawn(connection(stream, Arc::clone(&server), stop.clone()));
            }
            Err(error) => {
                tracing::warn!(%error, "can't accept a connection; retrying");
                // The process is probably out of file descriptors. A short pause lets other connections close.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, server: Arc<Server>, stop: CancellationToken) {
    // Without this option a small answer waits for the acknowledgement of the previous one.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "can't set TCP_NODELAY on a connection");
    }
    let service = service_fn(move |request| {
        let server = Arc::clone(&server);
        async move { server.respond(request).await }
    });
    let builder = auto::Builder::new(TokioExecutor::new());
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(GRACE, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended with an error");
    }
}

/// An error that breaks the connection. When a service fails, hyper closes the connection or resets the HTTP/2 stream.
#[derive(Debug)]
struct BrokenOnPurpose;

impl fmt::Display for BrokenOnPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the connection is broken on purpose")
    }
}

impl std::error::Error for BrokenOnPurpose {}

impl Server {
    async fn respond(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, BrokenOnPurpose> {
        let outgoing = match self.read(request).await {
            Ok(outgoing) => outgoing,
            Err(refusal) => return write(refusal),
        };
        if control::is_control(&outgoing) {
            return write(control::answer(&self.account, &outgoing).await);
        }
        let credential = Credential::read(&outgoing.headers);
        if let Some(Credential::Token(token)) = &credential {
            self.remember(token);
        }
        if let Some(refusal) = auth::refusal(&self.account, credential.as_ref(), &outgoing) {
            return write(refusal);
        }
        let host = outgoing.headers.get_optional_str(&HOST).map(str::to_owned);
        let is_account = outgoing.segments().is_empty();
        match self.account.shared_wire().send(outgoing).await {
            Ok(answer) if is_account && answer.is_success() => write(with_called_address(answer, host)),
            Ok(answer) => write(answer),
            Err(NoAnswer::NotSent | NoAnswer::AnswerLost) => Err(BrokenOnPurpose),
            Err(NoAnswer::Unroutable(error)) => {
                tracing::debug!(%error, "the SDK's emulator did not route a request");
                Err(BrokenOnPurpose)
            }
        }
    }

    /// Reads a request completely and directs it to the account's write region.
    async fn read(&self, request: Request<Incoming>) -> Result<Outgoing, Answer> {
        let (parts, body) = request.into_parts();
        let method = method(parts.method.as_str())
            .ok_or_else(|| Answer::refusal(405, None, "This HTTP method is not supported."))?;
        let mut url = self.write_region()?;
        url.set_path(parts.uri.path());
        url.set_query(parts.uri.query());
        let mut headers = Headers::new();
        for (name, value) in &parts.headers {
            if let Ok(value) = value.to_str() {
                headers.insert(name.as_str().to_owned(), value.to_owned());
            }
        }
        // HTTP/2 has the host in the URI.
        if let Some(authority) = parts.uri.authority() {
            headers.insert(HOST, authority.to_string());
        }
        let body = Limited::new(body, MAX_BODY_BYTES).collect().await;
        let too_large = |_| Answer::refusal(413, None, "Request size is too large.");
        let by_agent = || headers.get_optional_str(&USER_AGENT).and_then(suffix).map(Arc::from);
        Ok(Outgoing {
            client: self.client.clone().or_else(by_agent),
            method,
            url,
            headers,
            body: body.map_err(too_large)?.to_bytes(),
        })
    }

    /// Returns the URL of the write region. It is read each time, because a test may fail the account over.
    fn write_region(&self) -> Result<Url, Answer> {
        let config = self.account.store();
        let config = config.config();
        let name = config.write_region_name();
        let regions = config.active_regions();
        let region = regions.iter().find(|region| region.name() == name);
        region
            .map(|region| region.gateway_url().clone())
            .ok_or_else(|| Answer::refusal(503, None, "The account has no write region."))
    }

    fn remember(&self, token: &str) {
        self.with_tokens(|tokens| {
            if !tokens.iter().any(|seen| seen == token) {
                tokens.push(token.to_owned());
            }
        });
    }

    fn with_tokens<R>(&self, change: impl FnOnce(&mut Vec<String>) -> R) -> R {
        change(&mut self.tokens.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn method(name: &str) -> Option<Method> {
    let known = [Method::Get, Method::Post, Method::Put, Method::Delete, Method::Patch, Method::Head];
    known.into_iter().find(|method| method.as_str() == name)
}

/// Returns the suffix of a user agent, `product (details) suffix`, which the SDKs let an application set.
fn suffix(user_agent: &str) -> Option<&str> {
    let (_, suffix) = user_agent.split_once(") ")?;
    Some(suffix.trim()).filter(|suffix| !suffix.is_empty())
}

/// Replaces the account's regions by the address that the client called, so that the client continues to use it.
fn with_called_address(mut answer: Answer, host: Option<String>) -> Answer {
    let (Some(host), Ok(mut body)) = (host, serde_json::from_slice::<Value>(&answer.body)) else {
        return answer;
    };
    let name = body.pointer("/writableLocations/0/name").cloned();
    let location = json!([{ "name": name, "databaseAccountEndpoint": format!("http://{host}/") }]);
    body["readableLocations"] = location.clone();
    body["writableLocations"] = location;
    body["enableMultipleWriteLocations"] = json!(false);
    answer.body = Bytes::from(body.to_string());
    answer
}

fn write(answer: Answer) -> Result<Response<Full<Bytes>>, BrokenOnPurpose> {
    let mut response = Response::builder().status(answer.status);
    for (name, value) in answer.headers.iter() {
        response = response.header(name.as_str(), value.as_str());
    }
    let response = response.body(Full::new(answer.body));
    response.map_err(|error| {
        tracing::error!(%error, "can't write an answer as HTTP");
        BrokenOnPurpose
    })
}
