//! The dashboard in a headless browser.
//!
//! The tests need `chromedriver` and its browser. Without them they print a notice and pass, unless
//! `DUROXIDE_COSMOS_BROWSER=required` is set, as in CI. `DUROXIDE_COSMOS_SCREENSHOTS=<folder>` makes them save
//! screenshots there.

#[path = "../../tests/fixture/mod.rs"]
mod fixture;

use duroxide::{
    runtime::{registry::ActivityRegistry, Runtime},
    ActivityContext, Client as OrchestrationClient, OrchestrationContext, OrchestrationRegistry, RetryPolicy,
};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_dashboard::{serve, Options};
use duroxide_cosmos_emulator::{WireAction, WireRequest, WireRule};
use fantoccini::{wd::Capabilities, Client, ClientBuilder, Locator};
use fixture::{goes_to, Fixture, PATIENCE};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{json, Value};
use std::{
    net::SocketAddr,
    path::PathBuf,
    process::Stdio,
    sync::{
        atomic::{AtomicUsize, Ordering},
        Arc,
    },
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpListener,
    process::{Child, Command},
};

/// An id or a payload that would run a script if it were parsed as markup.
const MARKUP: &str = "<img src=x onerror=\"document.title='owned'\"> & 'more' \"quotes\"/?#%20";

/// A headless browser with its driver process.
struct Browser {
    client: Client,
    _driver: Child,
}

impl Browser {
    /// Starts a browser; `None` if the machine has none.
    async fn open() -> Option<Self> {
        let program = std::env::var("CHROMEDRIVER").unwrap_or_else(|_| "chromedriver".to_owned());
        let started = Command::new(&program).arg("--port=0").stdout(Stdio::piped()).kill_on_drop(true).spawn();
        let mut driver = match started {
            Ok(driver) => driver,
            Err(error) => {
                let required = std::env::var("DUROXIDE_COSMOS_BROWSER").is_ok_and(|how| how == "required");
                assert!(!required, "{program} can't be run: {error}: apt-get install chromium chromium-driver");
                eprintln!("not tested: {program} is not installed");
                return None;
            }
        };
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = loop {
            let line = lines.next_line().await.unwrap().expect("chromedriver prints its port");
            if let Some((_, port)) = line.split_once("started successfully on port ") {
                break port.trim_end_matches('.').to_owned();
            }
        };
        // The pipe must not fill up, or chromedriver would block.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let arguments =
            ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,1150"];
        let capabilities = json!({ "goog:chromeOptions": { "args": arguments } });
        let Value::Object(capabilities) = capabilities else { unreachable!("an object") };
        let capabilities: Capabilities = capabilities.into_iter().collect();
        let mut builder = ClientBuilder::new(HttpConnector::new());
        let client = builder.capabilities(capabilities).connect(&format!("http://127.0.0.1:{port}")).await;
        Some(Self { client: client.expect("a browser"), _driver: driver })
    }

    /// The value of a script expression in the dashboard.
    async fn eval(&self, expression: &str) -> Value {
        self.client.execute(&format!("return ({expression})"), Vec::new()).await.expect(expression)
    }

    /// Waits until a script expression is true in the dashboard.
    async fn until(&self, expression: &str) {
        let waiting = async {
            while self.eval(expression).await != json!(true) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, waiting).await.is_err() {
            let shown = self.eval("document.body.innerText").await;
            panic!("{expression} does not become true in\n{}", shown.as_str().unwrap_or_default());
        }
    }

    /// Waits until the dashboard shows this text.
    async fn shows(&self, text: &str) {
        self.until(&format!("document.body.innerText.includes({})", json!(text))).await;
    }

    async fn click(&self, selector: &str) {
        self.client.find(Locator::Css(selector)).await.expect(selector).click().await.expect(selector);
    }

    async fn go(&self, address: &str) {
        self.client.goto(address).await.expect(address);
        // If only the part behind `#` differs, `goto` loads nothing.
        self.client.refresh().await.expect(address);
    }

    async fn screenshot(&self, name: &str) {
        let Ok(folder) = std::env::var("DUROXIDE_COSMOS_SCREENSHOTS") else { return };
        let image = self.client.screenshot().await.expect("a screenshot");
        std::fs::write(PathBuf::from(folder).join(name), image).expect("the screenshot is written");
    }

    async fn close(self) {
        self.client.close().await.expect("the browser closes");
    }
}

/// Serves the dashboard on a free port.
async fn serve_dashboard(provider: &Arc<CosmosDBProvider>, options: Options) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let provider = provider.clone();
    tokio::spawn(async move { serve(listener, provider, options, std::future::pending()).await.unwrap() });
    address
}

/// Starts a worker with orchestrations that fail, retry, wait and have children.
async fn start_worker(fixture: &Fixture) -> Arc<Runtime> {
    let failures = Arc::new(AtomicUsize::new(0));
    let activities = ActivityRegistry::builder()
        .register("Charge", move |_: ActivityContext, input: String| {
            let failures = failures.clone();
            async move {
                if failures.fetch_add(1, Ordering::Relaxed) < 2 {
                    return Err(format!("no answer {MARKUP}"));
                }
                Ok(format!("charged {input}"))
            }
        })
        .register("Pack", |_: ActivityContext, input: String| async move { Ok(format!("packed {input}")) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Order", |ctx: OrchestrationContext, input: String| async move {
            ctx.set_kv_value("customer", MARKUP);
            ctx.set_custom_status(format!("charging {MARKUP}"));
            ctx.schedule_activity_with_retry("Charge", input.as_str(), RetryPolicy::new(5)).await?;
            ctx.schedule_timer(Duration::from_millis(200)).await;
            let parcels = (0..3).map(|n| ctx.schedule_sub_orchestration("Parcel", format!("{input} {n}"))).collect();
            ctx.join(parcels).await;
            ctx.set_custom_status("waits for approval");
            let said = ctx.schedule_wait("approval").await;
            Ok(format!("{said} {MARKUP}"))
        })
        .register("Parcel", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_activity("Pack", input).await
        })
        .register("Bad", |_: OrchestrationContext, _: String| async move { Err::<String, _>(MARKUP.to_owned()) })
        .build();
    let provider = Arc::new(fixture.provider("worker").await);
    Runtime::start_with_store(provider, activities, orchestrations).await
}

/// The address of an instance's view.
fn view(address: SocketAddr, id: &str) -> String {
    let bytes = id.bytes().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    });
    format!("http://{address}/#/i/{}", bytes.collect::<String>())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_overview_and_an_instance_are_shown_and_foreign_markup_stays_text() {
    let Some(browser) = Browser::open().await else { return };
    let fixture = Fixture::new(1);
    let runtime = start_worker(&fixture).await;
    let provider = Arc::new(fixture.provider("dashboard").await);
    let client = OrchestrationClient::new(provider.clone());
    client.start_orchestration(MARKUP, "Order", "two books").await.unwrap();
    client.start_orchestration("bad", "Bad", MARKUP).await.unwrap();
    client.wait_for_orchestration("bad", PATIENCE).await.unwrap();
    let address = serve_dashboard(&provider, Options::default()).await;
    browser.go(&format!("http://{address}/")).await;
    browser.until("document.querySelectorAll('#workers tbody tr').length === 1").await;
    browser.until("document.querySelectorAll('#instances tbody tr').length === 5").await;
    browser.shows(MARKUP).await;
    // One instance with its timeline and its instance tree.
    browser.go(&view(address, MARKUP)).await;
    browser.until(&format!("document.getElementById('name')?.textContent === {}", json!(MARKUP))).await;
    browser.until("document.getElementById('custom')?.innerText.includes('waits for approval')").await;
    browser.until("document.querySelectorAll('#chart .bar.failed').length === 2").await;
    browser.shows("Charge (attempt 3)").await;
    browser.until("document.querySelectorAll('#chart .bar.waits').length === 1").await;
    browser.until("document.querySelectorAll('#tree li').length === 4").await;
    browser.until(&format!("document.querySelector('#values')?.innerText.includes({})", json!(MARKUP))).await;
    browser.click("#chart .bar.failed").await;
    browser
        .until(&format!(
            "document.getElementById('detail').innerText.includes({})",
            json!(format!("no answer {MARKUP}"))
        ))
        .await;
    browser.click("#examine").await;
    browser.shows("it waits for event approval; nothing is wrong").await;
    browser.screenshot("instance.png").await;
    // The markup in the id was not parsed.
    assert_eq!(browser.eval("document.querySelectorAll('img, main script').length").await, 0);
    assert_ne!(browser.eval("document.title").await, "owned");
    // The theme can be switched.
    let background = "getComputedStyle(document.body).backgroundColor";
    let before = browser.eval(background).await;
    browser.click("#theme").await;
    assert_ne!(browser.eval(background).await, before, "the themes have different backgrounds");
    browser.screenshot("dark.png").await;
    // The view refreshes itself.
    client.raise_event(MARKUP, "approval", "yes").await.unwrap();
    browser.until("document.getElementById('result')?.textContent.startsWith('yes ') === true").await;
    browser.go(&view(address, "bad")).await;
    browser.until(&format!("document.getElementById('result')?.textContent.includes({})", json!(MARKUP))).await;
    browser.go(&view(address, "missing")).await;
    browser.shows("there is no instance \"missing\"").await;
    // Without the option the server refuses changes.
    assert_eq!(browser.eval("document.querySelectorAll('.actions').length").await, 0);
    let request = "const done = arguments[0]; \
                   const headers = { 'Content-Type': 'application/json', 'X-Duroxide-Dashboard': '1' }; \
                   fetch('api/delete', { method: 'POST', headers, body: '{\"id\":\"bad\"}' }) \
                   .then((response) => response.json()).then((answer) => done(answer.error))";
    let refused = browser.client.execute_async(request, Vec::new()).await.unwrap();
    assert_eq!(refused, "this dashboard only reads: it was started without --allow-changes");
    browser.close().await;
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_instances_and_a_long_history_are_shown_in_pages() {
    let Some(browser) = Browser::open().await else { return };
    let fixture = Fixture::new(4);
    let provider = Arc::new(fixture.provider("dashboard").await);
    fixture::finish(&*provider, "order 0", None).await;
    fixture.copy_instance("order 0", (1..1_000).map(|n| format!("order {n}"))).await;
    fixture::finish_after(&*provider, "long", 1, 5_000).await;
    let address = serve_dashboard(&provider, Options::default()).await;
    browser.go(&format!("http://{address}/")).await;
    let rows = |count: usize| format!("document.querySelectorAll('#instances tbody tr').length === {count}");
    browser.until(&rows(50)).await;
    browser.click(".pager button").await;
    browser.until(&rows(100)).await;
    browser.until("Number(document.querySelector('.Completed b')?.textContent) === 1001").await;
    // Each filter loads the list again.
    let text = browser.client.find(Locator::Css("input[name=text]")).await.unwrap();
    text.send_keys("ORDER 77").await.unwrap();
    browser.click("form.filter button").await;
    browser.until(&rows(11)).await;
    text.clear().await.unwrap();
    browser.client.find(Locator::Css("select[name=status]")).await.unwrap().select_by_value("Failed").await.unwrap();
    browser.click("form.filter button").await;
    browser.until(&rows(0)).await;
    browser.go(&view(address, "long")).await;
    browser.shows("History: 5000 events").await;
    browser.shows("1 to 500 of 5000").await;
    browser.until("document.querySelectorAll('#history tbody tr').length === 500").await;
    browser.until("document.querySelectorAll('#chart .bar').length === 150").await;
    let later = "//button[text()='later']";
    browser.client.find(Locator::XPath(later)).await.unwrap().click().await.unwrap();
    browser.shows("501 to 1000 of 5000").await;
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_with_the_token_changes_an_instance_and_a_user_without_it_sees_nothing() {
    let Some(browser) = Browser::open().await else { return };
    let fixture = Fixture::new(1);
    let runtime = start_worker(&fixture).await;
    let provider = Arc::new(fixture.provider("dashboard").await);
    let client = OrchestrationClient::new(provider.clone());
    client.start_orchestration("order", "Order", "two books").await.unwrap();
    let options = Options::default().with_changes(true).with_token(Some("a secret".to_owned()));
    let address = serve_dashboard(&provider, options).await;
    browser.go(&format!("http://{address}/")).await;
    browser.shows("the token is missing or wrong").await;
    assert_eq!(browser.eval("document.body.innerText.includes('order')").await, false);
    browser.go(&format!("http://{address}/#token=a%20secret")).await;
    browser.until("document.querySelectorAll('#instances tbody tr').length > 0").await;
    assert_eq!(browser.eval("location.href.includes('secret')").await, false, "the token does not stay in the address");
    browser.go(&view(address, "order")).await;
    browser.until("document.getElementById('custom')?.innerText.includes('waits for approval')").await;
    browser.client.find(Locator::Css("input[placeholder=event]")).await.unwrap().send_keys("approval").await.unwrap();
    browser.client.find(Locator::Css("input[placeholder=data]")).await.unwrap().send_keys("yes").await.unwrap();
    browser.client.find(Locator::XPath("//button[text()='Raise']")).await.unwrap().click().await.unwrap();
    browser.until("document.getElementById('result')?.textContent.startsWith('yes ') === true").await;
    browser.client.find(Locator::XPath("//button[text()='Delete']")).await.unwrap().click().await.unwrap();
    browser.client.accept_alert().await.unwrap();
    browser.shows("deleted 4 instances").await;
    assert!(provider.instance("order").await.unwrap().is_none());
    browser.close().await;
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_that_fails_does_not_hide_the_others() {
    let Some(browser) = Browser::open().await else { return };
    let fixture = Fixture::new(1);
    let runtime = start_worker(&fixture).await;
    let provider = Arc::new(fixture.provider("dashboard").await);
    let client = OrchestrationClient::new(provider.clone());
    client.start_orchestration("order", "Order", "two books").await.unwrap();
    client.wait_for_kv_value("order", "customer", PATIENCE).await.unwrap();
    let address = serve_dashboard(&provider, Options::default()).await;
    let forbidden = WireAction::Refuse { status: 403, substatus: Some(5301), retry_after: None };
    let workers = WireRule::new(forbidden.clone()).client("dashboard");
    fixture.account.wire().add(workers.matching(|request| goes_to(request, "$d:fleet")));
    browser.go(&format!("http://{address}/")).await;
    browser.shows("can't be shown: ").await;
    browser.until("document.querySelectorAll('#counts b').length === 3").await;
    browser.until("document.querySelectorAll('#instances tbody tr').length > 0").await;

    let reads_values = |request: &WireRequest<'_>| {
        let is_for_values = request.json().and_then(|body| Some(body["query"].as_str()?.contains("c.type = 'kv'")));
        goes_to(request, "order") && is_for_values == Some(true)
    };
    fixture.account.wire().add(WireRule::new(forbidden).client("dashboard").matching(reads_values));
    browser.go(&view(address, "order")).await;
    browser.shows("can't be shown: ").await;
    browser.until("document.getElementById('custom')?.innerText.includes('waits for approval')").await;
    browser.close().await;
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_other_machines_can_reach_needs_a_token() {
    let fixture = Fixture::new(1);
    let provider = Arc::new(fixture.provider("dashboard").await);
    for token in [None, Some(String::new())] {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let refused =
            serve(listener, provider.clone(), Options::default().with_token(token), std::future::pending()).await;
        assert!(refused.unwrap_err().to_string().contains("set a token"));
    }
}
