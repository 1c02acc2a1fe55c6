//! The page in a real browser, without a window: what it shows of an account with all kinds of things on it.
//!
//! Needs `chromedriver` and its browser. Where there is none the tests say so and pass, unless `DUROXIDE_COSMOS_BROWSER=required`, which
//! the gate sets. With `DUROXIDE_COSMOS_SCREENSHOTS=<folder>` they leave pictures there.

#[path = "../../tests/common/scene.rs"]
mod scene;

use duroxide::{
    runtime::{registry::ActivityRegistry, Runtime},
    ActivityContext, Client as Orchestrations, OrchestrationContext, OrchestrationRegistry, RetryPolicy,
};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_dashboard::{serve, Options};
use duroxide_cosmos_emulator::{WireAction, WireRequest, WireRule};
use fantoccini::{wd::Capabilities, Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use scene::{goes_to, Scene, PATIENCE};
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

/// What a user may call an instance, or write into it.
const NASTY: &str = "<img src=x onerror=\"document.title='owned'\"> & 'more' \"quotes\"/?#%20";

/// A browser, until it is closed.
struct Browser {
    client: Client,
    _driver: Child,
}

impl Browser {
    /// None where the machine has none.
    async fn open() -> Option<Self> {
        let program = std::env::var("CHROMEDRIVER").unwrap_or_else(|_| "chromedriver".to_owned());
        let started = Command::new(&program).arg("--port=0").stdout(Stdio::piped()).kill_on_drop(true).spawn();
        let mut driver = match started {
            Ok(driver) => driver,
            Err(error) => {
                let required = std::env::var("DUROXIDE_COSMOS_BROWSER").is_ok_and(|how| how == "required");
                assert!(!required, "{program} can't be run: {error}: apt-get install chromium chromium-driver");
                eprintln!("not tested: there is no {program} on this machine");
                return None;
            }
        };
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = loop {
            let line = lines.next_line().await.unwrap().expect("chromedriver says on which port it listens");
            if let Some((_, port)) = line.split_once("started successfully on port ") {
                break port.trim_end_matches('.').to_owned();
            }
        };
        // Somebody must read what else it says.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let arguments =
            ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,1150"];
        let wanted = json!({ "goog:chromeOptions": { "args": arguments } });
        let Value::Object(wanted) = wanted else { unreachable!("an object") };
        let wanted: Capabilities = wanted.into_iter().collect();
        let mut builder = ClientBuilder::new(HttpConnector::new());
        let client = builder.capabilities(wanted).connect(&format!("http://127.0.0.1:{port}")).await;
        Some(Self { client: client.expect("a browser"), _driver: driver })
    }

    /// What an expression is on the page.
    async fn eval(&self, expression: &str) -> Value {
        self.client.execute(&format!("return ({expression})"), Vec::new()).await.expect(expression)
    }

    /// Waits until an expression is true on the page.
    async fn until(&self, expression: &str) {
        let waiting = async {
            while self.eval(expression).await != json!(true) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, waiting).await.is_err() {
            let shown = self.eval("document.body.innerText").await;
            panic!("{expression} does not come true on\n{}", shown.as_str().unwrap_or_default());
        }
    }

    /// Waits until this text is somewhere on the page.
    async fn shows(&self, text: &str) {
        self.until(&format!("document.body.innerText.includes({})", json!(text))).await;
    }

    async fn click(&self, selector: &str) {
        self.client.find(Locator::Css(selector)).await.expect(selector).click().await.expect(selector);
    }

    async fn go(&self, address: &str) {
        self.client.goto(address).await.expect(address);
        // Only what is behind the `#` may differ, which loads nothing.
        self.client.refresh().await.expect(address);
    }

    async fn picture(&self, name: &str) {
        let Ok(folder) = std::env::var("DUROXIDE_COSMOS_SCREENSHOTS") else { return };
        let picture = self.client.screenshot().await.expect("a picture");
        std::fs::write(PathBuf::from(folder).join(name), picture).expect("the picture is written");
    }

    async fn close(self) {
        self.client.close().await.expect("it is closed");
    }
}

async fn page(provider: &Arc<CosmosDBProvider>, options: Options) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let provider = provider.clone();
    tokio::spawn(async move { serve(listener, provider, options, std::future::pending()).await.unwrap() });
    address
}

async fn work(scene: &Scene) -> Arc<Runtime> {
    let failures = Arc::new(AtomicUsize::new(0));
    let activities = ActivityRegistry::builder()
        .register("Charge", move |_: ActivityContext, input: String| {
            let failures = failures.clone();
            async move {
                if failures.fetch_add(1, Ordering::Relaxed) < 2 {
                    return Err(format!("no answer {NASTY}"));
                }
                Ok(format!("charged {input}"))
            }
        })
        .register("Pack", |_: ActivityContext, input: String| async move { Ok(format!("packed {input}")) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Order", |ctx: OrchestrationContext, input: String| async move {
            ctx.set_kv_value("customer", NASTY);
            ctx.set_custom_status(format!("charging {NASTY}"));
            ctx.schedule_activity_with_retry("Charge", input.as_str(), RetryPolicy::new(5)).await?;
            ctx.schedule_timer(Duration::from_millis(200)).await;
            let parcels = (0..3).map(|n| ctx.schedule_sub_orchestration("Parcel", format!("{input} {n}"))).collect();
            ctx.join(parcels).await;
            ctx.set_custom_status("waits for approval");
            let said = ctx.schedule_wait("approval").await;
            Ok(format!("{said} {NASTY}"))
        })
        .register("Parcel", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_activity("Pack", input).await
        })
        .register("Bad", |_: OrchestrationContext, _: String| async move { Err::<String, _>(NASTY.to_owned()) })
        .build();
    let provider = Arc::new(scene.provider("worker").await);
    Runtime::start_with_store(provider, activities, orchestrations).await
}

/// The address of an instance's view.
fn view(page: SocketAddr, id: &str) -> String {
    let bytes = id.bytes().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    });
    format!("http://{page}/#/i/{}", bytes.collect::<String>())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_runs_is_shown_and_what_users_wrote_is_text() {
    let Some(browser) = Browser::open().await else { return };
    let scene = Scene::new(1);
    let runtime = work(&scene).await;
    let store = Arc::new(scene.provider("page").await);
    let client = Orchestrations::new(store.clone());
    client.start_orchestration(NASTY, "Order", "two books").await.unwrap();
    client.start_orchestration("bad", "Bad", NASTY).await.unwrap();
    client.wait_for_orchestration("bad", PATIENCE).await.unwrap();
    let page = page(&store, Options::default()).await;
    browser.go(&format!("http://{page}/")).await;
    browser.until("document.querySelectorAll('#fleet tbody tr').length === 1").await;
    browser.until("document.querySelectorAll('#instances tbody tr').length === 5").await;
    browser.shows(NASTY).await;
    // One instance, its timeline, its family.
    browser.go(&view(page, NASTY)).await;
    browser.until(&format!("document.getElementById('name')?.textContent === {}", json!(NASTY))).await;
    browser.until("document.getElementById('custom')?.innerText.includes('waits for approval')").await;
    browser.until("document.querySelectorAll('#chart .bar.failed').length === 2").await;
    browser.shows("Charge (attempt 3)").await;
    browser.until("document.querySelectorAll('#chart .bar.waits').length === 1").await;
    browser.until("document.querySelectorAll('#tree li').length === 4").await;
    browser.until(&format!("document.querySelector('#values')?.innerText.includes({})", json!(NASTY))).await;
    browser.click("#chart .bar.failed").await;
    browser
        .until(&format!(
            "document.getElementById('detail').innerText.includes({})",
            json!(format!("no answer {NASTY}"))
        ))
        .await;
    browser.click("#examine").await;
    browser.shows("it waits for event approval; nothing is wrong").await;
    browser.picture("instance.png").await;
    // What it is called has done nothing.
    assert_eq!(browser.eval("document.querySelectorAll('img, main script').length").await, 0);
    assert_ne!(browser.eval("document.title").await, "owned");
    // Dark and light.
    let ground = "getComputedStyle(document.body).backgroundColor";
    let before = browser.eval(ground).await;
    browser.click("#theme").await;
    assert_ne!(browser.eval(ground).await, before, "the other one has another ground");
    browser.picture("dark.png").await;
    // It follows what happens.
    client.raise_event(NASTY, "approval", "yes").await.unwrap();
    browser.until("document.getElementById('result')?.textContent.startsWith('yes ') === true").await;
    browser.go(&view(page, "bad")).await;
    browser.until(&format!("document.getElementById('result')?.textContent.includes({})", json!(NASTY))).await;
    browser.go(&view(page, "nobody")).await;
    browser.shows("there is no instance \"nobody\"").await;
    // It only reads.
    assert_eq!(browser.eval("document.querySelectorAll('.actions').length").await, 0);
    let order = "const done = arguments[0]; \
                 fetch('api/delete', { method: 'POST', headers: { 'Content-Type': 'application/json', 'X-Duroxide-Page': '1' }, \
                 body: '{\"id\":\"bad\"}' }).then((answer) => answer.json()).then((told) => done(told.error))";
    let refused = browser.client.execute_async(order, Vec::new()).await.unwrap();
    assert_eq!(refused, "this page only reads: it was started without --allow-changes");
    browser.close().await;
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_instances_and_a_long_history_are_shown_a_page_at_a_time() {
    let Some(browser) = Browser::open().await else { return };
    let scene = Scene::new(4);
    let store = Arc::new(scene.provider("page").await);
    scene::finish(&*store, "order 0", None).await;
    scene.copy("order 0", (1..1_000).map(|n| format!("order {n}"))).await;
    scene::finish_after(&*store, "long", 1, 5_000).await;
    let page = page(&store, Options::default()).await;
    browser.go(&format!("http://{page}/")).await;
    let rows = |count: usize| format!("document.querySelectorAll('#instances tbody tr').length === {count}");
    browser.until(&rows(50)).await;
    browser.click(".pager button").await;
    browser.until(&rows(100)).await;
    browser.until("Number(document.querySelector('.Completed b')?.textContent) === 1001").await;
    // Each filter asks anew.
    let text = browser.client.find(Locator::Css("input[name=text]")).await.unwrap();
    text.send_keys("ORDER 77").await.unwrap();
    browser.click("form.filter button").await;
    browser.until(&rows(11)).await;
    text.clear().await.unwrap();
    browser.client.find(Locator::Css("select[name=status]")).await.unwrap().select_by_value("Failed").await.unwrap();
    browser.click("form.filter button").await;
    browser.until(&rows(0)).await;
    browser.go(&view(page, "long")).await;
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
async fn who_may_change_something_does_it_from_the_page_and_who_has_no_token_sees_nothing() {
    let Some(browser) = Browser::open().await else { return };
    let scene = Scene::new(1);
    let runtime = work(&scene).await;
    let store = Arc::new(scene.provider("page").await);
    let client = Orchestrations::new(store.clone());
    client.start_orchestration("order", "Order", "two books").await.unwrap();
    let page = page(&store, Options::default().with_changes(true).with_token(Some("a secret".to_owned()))).await;
    browser.go(&format!("http://{page}/")).await;
    browser.shows("the token is missing or wrong").await;
    assert_eq!(browser.eval("document.body.innerText.includes('order')").await, false);
    browser.go(&format!("http://{page}/#token=a%20secret")).await;
    browser.until("document.querySelectorAll('#instances tbody tr').length > 0").await;
    assert_eq!(browser.eval("location.href.includes('secret')").await, false, "it is not left in the address");
    browser.go(&view(page, "order")).await;
    browser.until("document.getElementById('custom')?.innerText.includes('waits for approval')").await;
    browser.client.find(Locator::Css("input[placeholder=event]")).await.unwrap().send_keys("approval").await.unwrap();
    browser.client.find(Locator::Css("input[placeholder=data]")).await.unwrap().send_keys("yes").await.unwrap();
    browser.client.find(Locator::XPath("//button[text()='Raise']")).await.unwrap().click().await.unwrap();
    browser.until("document.getElementById('result')?.textContent.startsWith('yes ') === true").await;
    browser.client.find(Locator::XPath("//button[text()='Delete']")).await.unwrap().click().await.unwrap();
    browser.client.accept_alert().await.unwrap();
    browser.shows("deleted 4 instances").await;
    assert!(store.instance("order").await.unwrap().is_none());
    browser.close().await;
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_that_can_not_be_shown_hides_no_other() {
    let Some(browser) = Browser::open().await else { return };
    let scene = Scene::new(1);
    let runtime = work(&scene).await;
    let store = Arc::new(scene.provider("page").await);
    let client = Orchestrations::new(store.clone());
    client.start_orchestration("order", "Order", "two books").await.unwrap();
    client.wait_for_kv_value("order", "customer", PATIENCE).await.unwrap();
    let page = page(&store, Options::default()).await;
    let forbidden = WireAction::Refuse { status: 403, substatus: Some(5301), retry_after: None };
    let fleet = WireRule::new(forbidden.clone()).client("page").matching(|request| goes_to(request, "$d:fleet"));
    scene.account.wire().add(fleet);
    browser.go(&format!("http://{page}/")).await;
    browser.shows("can't be shown: ").await;
    browser.until("document.querySelectorAll('#counts b').length === 3").await;
    browser.until("document.querySelectorAll('#instances tbody tr').length > 0").await;

    let asks_for_values = |request: &WireRequest<'_>| {
        let question = request.json().and_then(|body| Some(body["query"].as_str()?.contains("c.type = 'kv'")));
        goes_to(request, "order") && question == Some(true)
    };
    scene.account.wire().add(WireRule::new(forbidden).client("page").matching(asks_for_values));
    browser.go(&view(page, "order")).await;
    browser.shows("can't be shown: ").await;
    browser.until("document.getElementById('custom')?.innerText.includes('waits for approval')").await;
    browser.close().await;
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_others_can_reach_needs_a_token() {
    let scene = Scene::new(1);
    let store = Arc::new(scene.provider("page").await);
    for token in [None, Some(String::new())] {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let refused =
            serve(listener, store.clone(), Options::default().with_token(token), std::future::pending()).await;
        assert!(refused.unwrap_err().to_string().contains("give a token"));
    }
}
