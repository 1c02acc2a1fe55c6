//! A cache for Entra ID tokens.
//!
//! The SDK asks the credential for a token with every request, and not every credential caches tokens. The developer
//! tools start `az` each time. The cache works as follows:
//!
//! - It renews a token shortly before the token expires. Requests use the old token meanwhile.
//! - It runs one fetch at a time for each set of scopes, in a separate task. A caller that is cancelled does not
//!   cancel the fetch.
//! - If a renewal fails, requests use the old token as long as it is valid.
//! - If a fetch fails and no token is valid, every request gets that error until a pause is over. The pauses are 1,
//!   2, 4 … 30 s, with jitter.
//! - A fetch that takes longer than [`TIME_LIMIT`] counts as failed.
//! - It drops a token that the service refuses, at most once in [`DROP_INTERVAL`]. The next request fetches another.

use std::{
    collections::HashMap,
    error::Error as StdError,
    fmt,
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc, Mutex, MutexGuard, PoisonError,
    },
    time::Duration,
};

use async_trait::async_trait;
use azure_core::{
    credentials::{AccessToken, TokenCredential, TokenRequestOptions},
    error::ErrorKind,
};
use futures::{
    future::{BoxFuture, Shared},
    FutureExt,
};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::warn;

use crate::model::{clock::millis, Clock, Millis, Randomness};

/// The cache renews a token this long before it expires, or at half of its lifetime if that is later.
const RENEW_BEFORE: Duration = Duration::from_secs(5 * 60);
/// The pause after a failed renewal while the old token is valid.
const RENEWAL_PAUSE: Duration = Duration::from_secs(10);

/// The time limit of one fetch. Some credentials have no limit of their own.
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// The pauses after a failed fetch while there is no valid token.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The shortest time between two drops of refused tokens. If the service refuses the next token too, the token is not
/// the cause.
const DROP_INTERVAL: Duration = Duration::from_secs(60);

type CredentialFactory = Box<dyn Fn() -> Option<Arc<dyn TokenCredential>> + Send + Sync>;
type Fetch = Shared<BoxFuture<'static, Result<AccessToken, SharedTokenError>>>;
type TokenSender = oneshot::Sender<Result<AccessToken, SharedTokenError>>;

/// A credential that caches the tokens of another one.
pub(super) struct CachingCredential {
    inner: Mutex<Arc<dyn TokenCredential>>,
    /// Creates the inner credential again. Credentials of `azure_identity` cache tokens themselves, by this machine's
    /// clock, and would return the refused token again.
    factory: Option<CredentialFactory>,
    clock: Clock,
    randomness: Randomness,
    entries: Arc<CachedTokens>,
}

/// The cached tokens of one client. The store drops them after a refusal.
#[derive(Clone, Default)]
pub(crate) struct TokenCache(Arc<CachedTokens>);

impl TokenCache {
    /// Drops the tokens after the service refused the token of a request that was begun at `begun`. Returns whether
    /// the next attempt has another token. It is `false` if the service refused that other token already.
    pub(crate) fn drop_refused(&self, begun: Instant) -> bool {
        let mut entries = self.0.lock();
        let now = Instant::now();
        let mut has_another = false;
        for entry in entries.values_mut() {
            let is_recent = entry.dropped_at.is_some_and(|at| now.duration_since(at) < DROP_INTERVAL);
            if !is_recent && entry.cached.take().is_some() {
                entry.dropped_at = Some(now);
                self.0.dropped.store(true, Ordering::SeqCst);
            }
            // Many requests may be in flight with the same token. Only the first of them drops it.
            has_another |= entry.dropped_at.is_some_and(|at| begun <= at);
        }
        has_another
    }
}

impl fmt::Debug for TokenCache {
    // Not derived, because the cache holds tokens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenCache")
    }
}

/// The tokens by scopes. The other options of a token request concern only its transport.
#[derive(Default)]
struct CachedTokens {
    by_scopes: Mutex<HashMap<Vec<String>, ScopeEntry>>,
    /// Whether a token was dropped since the inner credential was created.
    dropped: AtomicBool,
}

#[derive(Default)]
struct ScopeEntry {
    cached: Option<CachedToken>,
    in_flight: Option<Fetch>,
    failure: Option<RefreshFailure>,
    dropped_at: Option<Instant>,
}

/// A failed fetch.
struct RefreshFailure {
    error: SharedTokenError,
    pause: Duration,
    /// The time before which no other fetch begins.
    until: Instant,
}

struct CachedToken {
    token: AccessToken,
    renew_at: Millis,
}

impl CachedToken {
    fn is_valid(&self, now: Millis) -> bool {
        now < expiry(&self.token)
    }
}

/// The expiry of a token. Zero if it is before the epoch.
fn expiry(token: &AccessToken) -> Millis {
    u64::try_from(token.expires_on.unix_timestamp_nanos() / 1_000_000).unwrap_or(0)
}

/// The next step of a caller.
enum TokenPlan {
    Use(AccessToken),
    Await(Fetch),
    Fail(SharedTokenError),
}

impl CachingCredential {
    pub(super) fn new(inner: Arc<dyn TokenCredential>, clock: Clock, randomness: Randomness) -> Self {
        Self { inner: Mutex::new(inner), factory: None, clock, randomness, entries: Arc::default() }
    }

    /// Adds a function that creates the inner credential again after the service refused one of its tokens.
    pub(super) fn recreated_by(
        self,
        factory: impl Fn() -> Option<Arc<dyn TokenCredential>> + Send + Sync + 'static,
    ) -> Self {
        Self { factory: Some(Box::new(factory)), ..self }
    }

    /// The inner credential. After a token was dropped, it is a new one.
    fn inner(&self) -> Arc<dyn TokenCredential> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if self.entries.dropped.swap(false, Ordering::SeqCst) {
            if let Some(new) = self.factory.as_ref().and_then(|create| create()) {
                *inner = new;
            }
        }
        inner.clone()
    }

    pub(super) fn tokens(&self) -> TokenCache {
        TokenCache(self.entries.clone())
    }

    /// The next step of a caller, and a sender if the caller must begin a fetch. It can't begin here, where the
    /// entries are locked.
    fn plan(&self, scopes: &[String]) -> (TokenPlan, Option<TokenSender>) {
        let now = self.clock.now();
        self.entries.with(scopes, |entry| {
            let valid = entry.cached.as_ref().filter(|cached| cached.is_valid(now));
            if let Some(cached) = valid.filter(|cached| now < cached.renew_at) {
                return (TokenPlan::Use(cached.token.clone()), None);
            }
            let old = valid.map(|cached| cached.token.clone());
            let failure = entry.failure.as_ref().filter(|failure| Instant::now() < failure.until);
            if let (None, Some(failure)) = (&old, failure) {
                return (TokenPlan::Fail(failure.error.clone()), None);
            }
            let (fetch, begin) = entry.join_fetch();
            (old.map_or(TokenPlan::Await(fetch), TokenPlan::Use), begin)
        })
    }

    /// Fetches a token in a task that continues even if no caller waits.
    fn begin(&self, scopes: Vec<String>, answer: TokenSender) {
        let (inner, clock, jitter) = (self.inner(), self.clock.clone(), self.randomness.fraction());
        let in_flight = RefreshInFlight { entries: self.entries.clone(), scopes };
        tokio::spawn(async move {
            let scopes: Vec<&str> = in_flight.scopes.iter().map(String::as_str).collect();
            let token = match tokio::time::timeout(TIME_LIMIT, inner.get_token(&scopes, None)).await {
                Ok(token) => token.map_err(SharedTokenError::new),
                Err(_) => Err(SharedTokenError::new(FetchTimeout)),
            };
            in_flight.entries.with(&in_flight.scopes, |entry| entry.store(&token, clock.now(), jitter));
            drop(in_flight);
            // An error means that no caller waits any more.
            let _ = answer.send(token);
        });
    }
}

impl CachedTokens {
    fn lock(&self) -> MutexGuard<'_, HashMap<Vec<String>, ScopeEntry>> {
        self.by_scopes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<R>(&self, scopes: &[String], access: impl FnOnce(&mut ScopeEntry) -> R) -> R {
        access(self.lock().entry(scopes.to_vec()).or_default())
    }
}

impl ScopeEntry {
    /// The running fetch, or a new one that the caller begins.
    fn join_fetch(&mut self) -> (Fetch, Option<TokenSender>) {
        if let Some(fetch) = &self.in_flight {
            return (fetch.clone(), None);
        }
        let (answer, answered) = oneshot::channel();
        let ended = async move { answered.await.unwrap_or_else(|cut_off| Err(SharedTokenError::new(cut_off))) };
        let fetch = ended.boxed().shared();
        self.in_flight = Some(fetch.clone());
        (fetch, Some(answer))
    }

    /// Stores the token of a fetch. After a failed fetch, keeps the old token a while longer.
    fn store(&mut self, answer: &Result<AccessToken, SharedTokenError>, now: Millis, jitter: f64) {
        match answer {
            Ok(token) => {
                self.failure = None;
                let expiry = expiry(token);
                let ahead = millis(RENEW_BEFORE).min(expiry.saturating_sub(now) / 2);
                self.cached = Some(CachedToken { token: token.clone(), renew_at: expiry - ahead });
            }
            Err(error) => {
                if let Some(cached) = self.cached.as_mut().filter(|cached| cached.is_valid(now)) {
                    let expires = cached.token.expires_on;
                    warn!(%error, %expires, "renewing the token failed, using the old one until it expires");
                    cached.renew_at = now + millis(RENEWAL_PAUSE);
                } else {
                    self.fail(error.clone(), jitter);
                }
            }
        }
    }

    /// Records a failure and delays the next fetch, longer after each failure.
    fn fail(&mut self, error: SharedTokenError, jitter: f64) {
        let pause = self.failure.as_ref().map_or(FIRST_PAUSE, |before| (before.pause * 2).min(LONGEST_PAUSE));
        let until = Instant::now() + pause.mul_f64(0.75 + jitter / 2.0);
        self.failure = Some(RefreshFailure { error, pause, until });
    }
}

/// A running fetch. When it ends, even together with its runtime, the next caller may begin another.
struct RefreshInFlight {
    entries: Arc<CachedTokens>,
    scopes: Vec<String>,
}

impl Drop for RefreshInFlight {
    fn drop(&mut self) {
        self.entries.with(&self.scopes, |entry| entry.in_flight = None);
    }
}

#[async_trait]
impl TokenCredential for CachingCredential {
    async fn get_token(
        &self,
        scopes: &[&str],
        _options: Option<TokenRequestOptions<'_>>,
    ) -> azure_core::Result<AccessToken> {
        let scopes: Vec<String> = scopes.iter().map(|scope| (*scope).to_owned()).collect();
        let (plan, begin) = self.plan(&scopes);
        if let Some(answer) = begin {
            self.begin(scopes, answer);
        }
        match plan {
            TokenPlan::Use(token) => Ok(token),
            TokenPlan::Await(fetch) => {
                fetch.await.map_err(|error| azure_core::Error::new(ErrorKind::Credential, error))
            }
            TokenPlan::Fail(error) => Err(azure_core::Error::new(ErrorKind::Credential, error)),
        }
    }
}

impl fmt::Debug for CachingCredential {
    // Not derived, because the cache holds tokens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CachingCredential")
    }
}

/// The error for a credential that does not answer within [`TIME_LIMIT`].
#[derive(Debug)]
struct FetchTimeout;

impl fmt::Display for FetchTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the credential gave no answer within {TIME_LIMIT:?}")
    }
}

impl StdError for FetchTimeout {}

/// One failure, shared by all callers that waited for the fetch.
#[derive(Clone, Debug)]
struct SharedTokenError(Arc<dyn StdError + Send + Sync>);

impl SharedTokenError {
    fn new(error: impl StdError + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }
}

impl fmt::Display for SharedTokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for SharedTokenError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

#[cfg(test)]
mod tests;
